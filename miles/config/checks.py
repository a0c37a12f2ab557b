"""Rules that span settings. Each is a pure function that yields issues; all run, then all report.

They look at no file and no machine; `preflight.py` does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import cast

from miles.config.batch_math import derive_batch_plan
from miles.config.checks_advantages import ADVANTAGE_CHECKS
from miles.config.checks_compute import COMPUTE_CHECKS
from miles.config.checks_data import DATA_CHECKS
from miles.config.checks_evaluation import EVALUATION_CHECKS
from miles.config.checks_external import EXTERNAL_CHECKS
from miles.config.checks_hooks import HOOK_CHECKS
from miles.config.checks_losses import LOSS_CHECKS
from miles.config.checks_prefill import PREFILL_CHECKS
from miles.config.eval_settings import evaluated, evaluates_without_reward, why_it_evaluates
from miles.config.known import Check
from miles.config.resources import (
    evaluates,
    needs_engines,
    only_evaluates,
    only_trains,
    saves,
    trains_on_rewards,
    weights_transport,
)
from miles.config.reward_types import is_reward_type, known_reward_types, needs_label, reward_urls, split_boxed
from miles.config.schema import DataConfig, RolloutConfig, RunConfig
from miles.config.walk import leaves
from miles.errors import Issue
from miles.utils.step_path import STEP

INFERENCE_ROLLOUTS = (RolloutConfig().function_path, "miles.rollout.sglang_rollout.generate_rollout")
"""The built-in rollout functions that generate with the engines; the first is the default."""
SFT_ROLLOUT = "miles.rollout.sft_rollout.generate_rollout"
"""The built-in rollout function that takes responses from the data."""


def run_has_a_length(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.rollout.num_rollout is None and cfg.rollout.num_epoch is None:
        yield Issue("rollout.num_rollout", "neither --num-rollout nor --num-epoch is given", "--num-rollout STEPS")


def batches_fill_whole_steps(cfg: RunConfig) -> Iterator[Issue]:
    train = cfg.train
    plan = derive_batch_plan(
        rollout_batch_size=cfg.rollout.batch_size,
        n_samples_per_prompt=cfg.rollout.n_samples_per_prompt,
        global_batch_size=train.global_batch_size,
        num_steps_per_rollout=train.num_steps_per_rollout,
        allow_partial=train.allow_partial_train_step,
        dynamic=train.use_dynamic_global_batch_size,
    )
    if isinstance(plan, Issue):
        yield plan
        return
    ranks, size = cfg.cluster.train_ranks, plan.global_batch_size
    if size % ranks and not train.allow_partial_train_step and not train.use_dynamic_global_batch_size:
        fitting = max(n for n in range(1, ranks + 1) if size % n == 0)
        yield Issue(
            "cluster.train_ranks",
            f"a step of {size} samples ({plan.describe()}) cannot be shared evenly by {ranks} trainer ranks",
            f"--train-ranks {fitting}, or a batch that {ranks} divides",
        )


def batching_settings_have_their_effect(cfg: RunConfig) -> Iterator[Issue]:
    train = cfg.train
    if train.use_dynamic_global_batch_size and train.global_batch_size is not None:
        yield Issue(
            "train.use_dynamic_global_batch_size",
            f"takes the size of a step from the rollout, but --global-batch-size {train.global_batch_size} fixes it",
            "give only one of the two; --allow-partial-train-step keeps the size and trains on what is left over",
        )
    if train.allow_partial_train_step and train.global_batch_size is None:
        yield Issue(
            "train.allow_partial_train_step",
            "has no effect without --global-batch-size: there is no size that could leave something over",
            "--global-batch-size SAMPLES, or --use-dynamic-global-batch-size",
        )
    if train.balance_data and train.balance_by_flops:
        yield Issue(
            "train.balance_data",
            "ranks can have equally many tokens or equally many operations, not both",
            "--balance-by-flops alone",
        )


def loss_and_rollout_function_agree(cfg: RunConfig) -> Iterator[Issue]:
    loss, path = cfg.algorithm.loss_type, cfg.rollout.function_path
    if loss == "sft_loss" and path in INFERENCE_ROLLOUTS:
        yield Issue(
            "rollout.function_path",
            "--loss-type sft_loss trains on responses from the data, but this function generates them",
            f"--rollout-function-path {SFT_ROLLOUT}",
        )
    if loss != "sft_loss" and path == SFT_ROLLOUT:
        yield Issue(
            "rollout.function_path",
            f"takes responses from the data, which were not sampled: {loss} has no rewards or log-probabilities",
            f"--loss-type sft_loss, or --rollout-function-path {INFERENCE_ROLLOUTS[0]}",
        )
    if path == SFT_ROLLOUT and evaluates(cfg) and cfg.rollout.eval_function_path in (None, SFT_ROLLOUT):
        yield Issue(
            "rollout.eval_function_path",
            f"{why_it_evaluates(cfg)}, but the rollout function generates nothing that could be evaluated",
            f"--eval-function-path {INFERENCE_ROLLOUTS[0]}",
        )


def rewards_come_from_somewhere(cfg: RunConfig) -> Iterator[Issue]:
    builtin = cfg.rollout.function_path in INFERENCE_ROLLOUTS and cfg.rollout.custom_generate_function_path is None
    judged = trains_on_rewards(cfg) or evaluates_without_reward(cfg)
    if builtin and judged and cfg.reward.rm_type is None and cfg.reward.custom_rm_path is None:
        yield Issue(
            "reward.rm_type",
            "no reward: neither --rm-type nor --custom-rm-path is given",
            "--rm-type math, --rm-type exact, or --custom-rm-path package.module.function",
        )


def reward_type_exists(cfg: RunConfig) -> Iterator[Issue]:
    name = cfg.reward.rm_type
    if name is not None and not is_reward_type(name):
        yield Issue("reward.rm_type", f"there is no built-in reward {name!r}", known_reward_types(name))


def object_rewards_name_their_entry(cfg: RunConfig) -> Iterator[Issue]:
    name = cfg.reward.rm_type
    judges = name is not None and split_boxed(name)[1] == "dapo" and cfg.reward.custom_rm_path is None
    if judges and cfg.reward.reward_key is None and trains_on_rewards(cfg):
        yield Issue(
            "reward.reward_key",
            f"--rm-type {name} gives an object with score, acc and pred, and none of them is named",
            "--reward-key score",
        )


def remote_rewards_have_a_server(cfg: RunConfig) -> Iterator[Issue]:
    name, urls = cfg.reward.rm_type, reward_urls(cfg.reward.rm_url)
    if name is not None and split_boxed(name)[1] == "remote_rm" and not urls and cfg.reward.custom_rm_path is None:
        yield Issue(
            "reward.rm_url", "--rm-type remote_rm asks a server, and none is named", "--rm-url http://HOST:PORT"
        )
    for url in urls:
        if not re.match(r"https?://[^/\s]", url):
            yield Issue("reward.rm_url", f"{url!r} is no address of a server", "--rm-url http://HOST:PORT/PATH")


def deterministic_rewards_are_no_chance(cfg: RunConfig) -> Iterator[Issue]:
    name = cfg.reward.rm_type
    if cfg.run.deterministic and name is not None and split_boxed(name)[1] == "random":
        yield Issue(
            "reward.rm_type",
            f"{name} draws anew in every run, and --deterministic-mode promises the same run again",
            "--rm-type deterministic_random",
        )


def group_rewards_are_custom(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.reward.group_rm and cfg.reward.custom_rm_path is None:
        yield Issue(
            "reward.group_rm",
            "gives whole groups to a function, and the built-in rewards judge one sample at a time",
            "--custom-rm-path package.module.function, or leave out --group-rm",
        )


def rewards_have_their_labels(cfg: RunConfig) -> Iterator[Issue]:
    name = cfg.reward.rm_type
    graded = name is not None and is_reward_type(name) and needs_label(name) and cfg.reward.custom_rm_path is None
    plain = cfg.data.source_path == DataConfig.model_fields["source_path"].default
    if graded and plain and cfg.data.label_key is None and trains_on_rewards(cfg):
        yield Issue(
            "data.label_key",
            f"--rm-type {cfg.reward.rm_type} compares with a label, but none is loaded",
            "--label-key KEY, the key of the answer in the data",
        )


def sampling_is_the_policy(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.algorithm.loss_type != "sft_loss":
        why = "cuts the distribution, so the log-probabilities of samples are not the policy's and ratios are wrong"
        if cfg.rollout.top_p < 1:
            yield Issue("rollout.top_p", f"{cfg.rollout.top_p} {why}", "--rollout-top-p 1; --eval-top-p may cut")
        if cfg.rollout.top_k > 0:
            yield Issue("rollout.top_k", f"{cfg.rollout.top_k} {why}", "--rollout-top-k -1; --eval-top-k may cut")
    values = [("rollout.top_k", cfg.rollout.top_k, "--rollout-top-k"), ("eval.top_k", cfg.eval.top_k, "--eval-top-k")]
    values += [(f"eval.datasets.{i}.top_k", dataset.top_k, "top_k:") for i, dataset in enumerate(cfg.eval.datasets)]
    for path, top_k, flag in values:
        if top_k == 0:
            yield Issue(path, "0 leaves no token to sample", f"{flag} -1 keeps all tokens")


def learning_rate_schedule_is_possible(cfg: RunConfig) -> Iterator[Issue]:
    optimizer = cfg.optimizer
    if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters < optimizer.lr_warmup_iters:
        yield Issue(
            "optimizer.lr_decay_iters",
            f"the decay ends at step {optimizer.lr_decay_iters}, before the warm-up does at {optimizer.lr_warmup_iters}",
            f"--lr-decay-iters {optimizer.lr_warmup_iters} or more, since it counts the warm-up",
        )
    if optimizer.min_lr > optimizer.lr:
        yield Issue(
            "optimizer.min_lr",
            f"{optimizer.min_lr} is above the learning rate {optimizer.lr}",
            f"--min-lr {optimizer.lr} or less",
        )


def lengths_fit_the_context(cfg: RunConfig) -> Iterator[Issue]:
    context = cfg.rollout.max_context_len
    if context is not None and needs_engines(cfg):
        yield from length_issues(cfg, context, f"a context of {context}", "or a larger --rollout-max-context-len")


def length_issues(cfg: RunConfig, limit: int, limit_in_words: str, other_fix: str) -> Iterator[Issue]:
    """Issues of prompts and responses that may not fit into `limit` tokens together."""
    if only_evaluates(cfg):
        for path, dataset in evaluated(cfg):
            if dataset.max_response_len is not None and dataset.max_response_len >= limit:
                length, what = dataset.max_response_len, f"dataset {dataset.name}: responses"
                path = "eval" if path == "eval.prompt_data" else path
                yield _no_room(f"{path}.max_response_len", what, length, "prompt", limit, limit_in_words, other_fix)
        return
    prompt, response = cfg.rollout.max_prompt_len, cfg.rollout.max_response_len
    if prompt is not None and prompt < limit < prompt + response:
        yield Issue(
            "rollout.max_response_len",
            f"prompts of {prompt} and responses of {response} tokens can have {prompt + response} together, "
            f"more than {limit_in_words}",
            f"--rollout-max-response-len {limit - prompt} or less, {other_fix}",
        )
        return
    if prompt is not None and prompt >= limit:
        yield _no_room("rollout.max_prompt_len", "prompts", prompt, "response", limit, limit_in_words, other_fix)
    lengths = [("rollout.max_response_len", response), ("eval.max_response_len", cfg.eval.max_response_len)]
    lengths += [(f"eval.datasets.{i}.max_response_len", d.max_response_len) for i, d in enumerate(cfg.eval.datasets)]
    for path, length in lengths:
        if length is not None and length >= limit:
            yield _no_room(path, "responses", length, "prompt", limit, limit_in_words, other_fix)


def _no_room(path: str, what: str, length: int, other: str, limit: int, limit_in_words: str, other_fix: str) -> Issue:
    flag = next((leaf.flag for leaf in leaves() if leaf.path == path), path)
    problem = f"{what} of {length} tokens leave no room for a {other} in {limit_in_words}"
    return Issue(path, problem, f"{flag} below {limit}, {other_fix}")


def eval_has_data_and_interval(cfg: RunConfig) -> Iterator[Issue]:
    given = bool(cfg.eval.prompt_data or cfg.eval.datasets)
    if evaluates(cfg) and not given:
        without = "--num-rollout STEPS to train" if only_evaluates(cfg) else "leave out --eval-interval"
        problem = f"{why_it_evaluates(cfg)}, but nothing to evaluate on"
        yield Issue("eval.prompt_data", problem, f"--eval-prompt-data NAME FILE.jsonl, or {without}")
    if given and not evaluates(cfg) and not only_trains(cfg):
        yield Issue(
            "eval.interval",
            "evaluation data is given, but no --eval-interval, so it would never be used",
            "--eval-interval STEPS, or leave out the data",
        )


def eval_names_are_pairs_and_unique(cfg: RunConfig) -> Iterator[Issue]:
    words = cfg.eval.prompt_data
    if len(words) % 2:
        yield Issue(
            "eval.prompt_data",
            f"takes pairs of name and file, got {len(words)} words: {' '.join(words)}",
            "--eval-prompt-data NAME FILE.jsonl [NAME FILE.jsonl ...]",
        )
        words = []
    names = Counter([*words[::2], *(dataset.name for dataset in cfg.eval.datasets)])
    for name, count in names.items():
        if count > 1:
            yield Issue(
                "eval.datasets", f"{count} datasets have the name {name!r}", f"rename one: metrics are eval/{name}"
            )


def saving_saves(cfg: RunConfig) -> Iterator[Issue]:
    if saves(cfg) or only_evaluates(cfg) or cfg.debug.rollout_only or cfg.debug.load_rollout_data is not None:
        return
    without = "but without --save-interval or --save-trigger-sentinel nothing is saved"
    if cfg.checkpoint.save is not None:
        yield Issue("checkpoint.save", f"names {cfg.checkpoint.save}, {without}", "--save-interval STEPS")
    if cfg.checkpoint.keep_last is not None:
        problem = f"keeps {cfg.checkpoint.keep_last} checkpoints, {without}"
        yield Issue("checkpoint.keep_last", problem, "--save-interval STEPS")
    if cfg.checkpoint.async_save:
        yield Issue("checkpoint.async_save", f"is asked for, {without}", "--save-interval STEPS")


def one_half_of_a_run_at_a_time(cfg: RunConfig) -> Iterator[Issue]:
    debug = cfg.debug
    if debug.rollout_only and debug.train_only:
        problem = "--debug-rollout-only starts no trainer and --debug-train-only no engines: nothing would be left"
        yield Issue("debug.rollout_only", problem, "leave out one of the two")
    if debug.rollout_only and debug.load_rollout_data is not None:
        problem = "--debug-rollout-only starts no trainer that could train on --load-debug-rollout-data"
        yield Issue("debug.rollout_only", problem, "leave out one of the two")
    if debug.save_rollout_data is not None and debug.load_rollout_data is not None:
        problem = "--load-debug-rollout-data generates no samples that --save-debug-rollout-data could keep"
        yield Issue("debug.save_rollout_data", problem, "leave out one of the two")


def saved_samples_have_a_file_per_step(cfg: RunConfig) -> Iterator[Issue]:
    for path, pattern, flag in (
        ("debug.save_rollout_data", cfg.debug.save_rollout_data, "--save-debug-rollout-data"),
        ("debug.load_rollout_data", cfg.debug.load_rollout_data, "--load-debug-rollout-data"),
    ):
        if pattern is not None and STEP not in pattern:
            problem = f"{pattern} has no {STEP}, so all steps would share one file"
            yield Issue(path, problem, f"{flag} 'FOLDER/{STEP}.jsonl'")


def training_alone_needs_no_engines(cfg: RunConfig) -> Iterator[Issue]:
    if not only_trains(cfg):
        return
    if cfg.debug.load_rollout_data is None and cfg.rollout.function_path in INFERENCE_ROLLOUTS:
        yield Issue(
            "debug.train_only",
            f"starts no engines, but {cfg.rollout.function_path} generates with them",
            "--load-debug-rollout-data FILE, or a --rollout-function-path that makes samples without engines",
        )
    if evaluates(cfg):
        problem = f"{why_it_evaluates(cfg)}, but a run that only trains has no engines to evaluate"
        fix = "--num-rollout STEPS" if only_evaluates(cfg) else "--eval-interval null"
        yield Issue("eval.interval", problem, fix)
    if cfg.debug.load_rollout_data is not None and saves(cfg):
        yield Issue(
            "debug.load_rollout_data",
            "does not move through the prompts, so its checkpoints would resume at the wrong ones",
            "--save-interval null --save-trigger-sentinel null",
        )


def generating_alone_has_no_checkpoints(cfg: RunConfig) -> Iterator[Issue]:
    if not cfg.debug.rollout_only:
        return
    if saves(cfg):
        problem = "starts no trainer, so there is nothing to save"
        yield Issue("debug.rollout_only", problem, "--save-interval null --save-trigger-sentinel null")
    if cfg.checkpoint.load is not None:
        problem = "publishes no weights, so the engines would not hold those of --load"
        yield Issue("debug.rollout_only", problem, "--hf-checkpoint CHECKPOINT/hf, and leave out --load")


def a_weights_folder_is_used(cfg: RunConfig) -> Iterator[Issue]:
    weights = cfg.weights
    if weights.disk_dir is None or weights_transport(cfg) == "disk" or (weights.verify and weights.reload_interval):
        return
    yield Issue(
        "weights.disk_dir",
        f"names {weights.disk_dir}, but weights go by {weights_transport(cfg)} and nothing is proven through a folder",
        "--update-weight-transfer-mode disk, or --weights.reload-interval UPDATES",
    )


def custom_names_are_free(cfg: RunConfig) -> Iterator[Issue]:
    taken = {leaf.attribute: leaf for leaf in leaves()}
    for name in cfg.custom:
        leaf = taken.get(name)
        if leaf is not None:
            yield Issue(
                f"custom.{name}",
                f"args.{name} is the setting {leaf.path} already",
                f"set {leaf.path} ({(leaf.inverted or leaf.flags)[-1]}), or rename yours",
            )


def custom_values_are_plain(cfg: RunConfig) -> Iterator[Issue]:
    for name, value in cfg.custom.items():
        odd = _not_plain(value)
        if odd is not None:
            yield Issue(
                f"custom.{name}",
                f"holds a {type(odd).__name__}, {odd}, which a YAML file cannot keep",
                "put it in quotes, or use text, numbers, true, false, null, lists and mappings",
            )


def _not_plain(value: object) -> object | None:
    """The first key or value inside `value` that YAML cannot give back as it was."""
    if isinstance(value, dict):
        mapping = cast(dict[object, object], value)
        odd_key = next((key for key in mapping if not isinstance(key, str)), None)
        return odd_key if odd_key is not None else _first_not_plain(mapping.values())
    if isinstance(value, list):
        return _first_not_plain(cast(list[object], value))
    return None if isinstance(value, str | int | float | bool | None) else value


def _first_not_plain(values: Iterable[object]) -> object | None:
    return next((odd for odd in map(_not_plain, values) if odd is not None), None)


CHECKS: tuple[Check, ...] = (
    run_has_a_length,
    batches_fill_whole_steps,
    batching_settings_have_their_effect,
    *COMPUTE_CHECKS,
    loss_and_rollout_function_agree,
    rewards_come_from_somewhere,
    reward_type_exists,
    object_rewards_name_their_entry,
    remote_rewards_have_a_server,
    deterministic_rewards_are_no_chance,
    group_rewards_are_custom,
    rewards_have_their_labels,
    *DATA_CHECKS,
    *ADVANTAGE_CHECKS,
    sampling_is_the_policy,
    *LOSS_CHECKS,
    *PREFILL_CHECKS,
    learning_rate_schedule_is_possible,
    lengths_fit_the_context,
    eval_has_data_and_interval,
    eval_names_are_pairs_and_unique,
    *EVALUATION_CHECKS,
    *HOOK_CHECKS,
    saving_saves,
    one_half_of_a_run_at_a_time,
    saved_samples_have_a_file_per_step,
    training_alone_needs_no_engines,
    generating_alone_has_no_checkpoints,
    a_weights_folder_is_used,
    *EXTERNAL_CHECKS,
    custom_names_are_free,
    custom_values_are_plain,
)
