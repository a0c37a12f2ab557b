"""Rules about evaluation: what its datasets need, and runs that only evaluate."""

from __future__ import annotations

import re
from collections.abc import Iterator

from miles.config.eval_settings import evaluated
from miles.config.known import Check
from miles.config.resources import only_evaluates, trains_on_rewards
from miles.config.reward_types import is_reward_type, known_reward_types, needs_label, reward_urls, split_boxed
from miles.config.schema import EvalDataset, RunConfig
from miles.errors import Issue


def eval_datasets_have_a_reward(cfg: RunConfig) -> Iterator[Issue]:
    for where, dataset in evaluated(cfg):
        name, given = dataset.rm_type, cfg.reward.rm_type is not None or cfg.reward.custom_rm_path is not None
        if dataset.custom_rm_path is not None:
            continue
        if name is None and given:
            problem = f"dataset {dataset.name} unsets both rm_type and custom_rm_path, so nothing would judge it"
            yield Issue(where, problem, "give it one of the two, or leave both out")
        if name is None or (name == cfg.reward.rm_type and cfg.reward.custom_rm_path is None):
            continue  # told once, of the run
        if not is_reward_type(name):
            yield Issue(
                where, f"dataset {dataset.name}: there is no built-in reward {name!r}", known_reward_types(name)
            )
        elif split_boxed(name)[1] == "remote_rm" and not reward_urls(cfg.reward.rm_url):
            yield Issue(
                where, f"dataset {dataset.name}: remote_rm asks a server, and none is named", "--rm-url http://HOST"
            )


def eval_datasets_have_their_labels(cfg: RunConfig) -> Iterator[Issue]:
    if trains_on_rewards(cfg) and cfg.data.label_key is None and cfg.eval.label_key is None:
        return  # told of the training data
    for where, dataset in evaluated(cfg):
        name = dataset.rm_type
        graded = name is not None and dataset.custom_rm_path is None and is_reward_type(name) and needs_label(name)
        if graded and dataset.label_key is None:
            problem = f"dataset {dataset.name}: {name} compares with a label, but none is loaded"
            yield Issue(where, problem, "--eval-label-key KEY, or label_key in the dataset")


def eval_lengths_are_possible(cfg: RunConfig) -> Iterator[Issue]:
    for where, dataset in evaluated(cfg):
        least, most = dataset.min_new_tokens, dataset.max_response_len
        if most is not None and least > most:
            problem = f"dataset {dataset.name}: responses of {least} tokens or more cannot end within {most}"
            yield Issue(where, problem, f"--eval-min-new-tokens {most} or less")


def eval_names_are_names(cfg: RunConfig) -> Iterator[Issue]:
    (pattern,) = (mark.pattern for mark in EvalDataset.model_fields["name"].metadata if hasattr(mark, "pattern"))
    for name in cfg.eval.prompt_data[::2] if len(cfg.eval.prompt_data) % 2 == 0 else []:
        if not re.fullmatch(pattern, name):
            problem = f"{name!r} is no name: it becomes a metric and a folder"
            yield Issue("eval.prompt_data", problem, "use letters, digits, _, -, + and .")


def evaluating_alone_has_its_model(cfg: RunConfig) -> Iterator[Issue]:
    if not only_evaluates(cfg):
        return
    if cfg.checkpoint.load is not None:
        problem = "--num-rollout 0 starts no trainer, so the engines would not hold the weights of --load"
        yield Issue("checkpoint.load", problem, "--hf-checkpoint CHECKPOINT/hf, and leave out --load")
    if not cfg.eval.before_train:
        problem = "--skip-eval-before-train and --num-rollout 0 leave nothing to do"
        yield Issue("eval.before_train", problem, "leave out --skip-eval-before-train")


EVALUATION_CHECKS: tuple[Check, ...] = (
    eval_datasets_have_a_reward,
    eval_datasets_have_their_labels,
    eval_lengths_are_possible,
    eval_names_are_names,
    evaluating_alone_has_its_model,
)
