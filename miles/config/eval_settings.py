"""What each evaluation dataset is evaluated with: dataset before evaluation before rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from miles.config.resources import evaluates, only_evaluates
from miles.config.schema import EvalDataset, RunConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Everything about one dataset, with nothing left to look up elsewhere."""

    name: str
    path: str
    n_samples_per_eval_prompt: int = 1
    max_prompts: int | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    metadata_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    max_response_len: int | None = None
    """None leaves only the context as a limit."""
    max_prompt_len: int | None = None
    max_context_len: int | None = None
    """None takes the model's limit."""
    custom_generate_function_path: str | None = None
    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None


def eval_datasets(cfg: RunConfig) -> list[EvalDataset]:
    """The datasets with settings of their own, then the pairs of `--eval-prompt-data`; a name without file is left out."""
    words = cfg.eval.prompt_data
    pairs = [EvalDataset.model_construct(name=n, path=p) for n, p in zip(words[::2], words[1::2], strict=False)]
    return [*cfg.eval.datasets, *pairs]


def eval_settings(cfg: RunConfig) -> list[EvalSettings]:
    """The settings of every dataset of the run, in the order of `eval_datasets`."""
    return [settings_of(cfg, dataset) for dataset in eval_datasets(cfg)]


def evaluated(cfg: RunConfig) -> Iterator[tuple[str, EvalSettings]]:
    """Setting that lists each dataset, and the dataset's settings; none when the run does not evaluate."""
    if not evaluates(cfg):
        return
    listed = len(cfg.eval.datasets)
    for number, dataset in enumerate(eval_settings(cfg)):
        yield f"eval.datasets.{number}" if number < listed else "eval.prompt_data", dataset


def evaluates_without_reward(cfg: RunConfig) -> bool:
    """Whether some evaluation dataset names no reward of its own and the run names none."""
    return any(dataset.rm_type is None and dataset.custom_rm_path is None for _, dataset in evaluated(cfg))


def why_it_evaluates(cfg: RunConfig) -> str:
    """What asks for evaluation, in the words of the command line."""
    if only_evaluates(cfg):
        return "--num-rollout 0 is given, which only evaluates"
    return f"--eval-interval {cfg.eval.interval} is given"


def settings_of(cfg: RunConfig, dataset: EvalDataset) -> EvalSettings:
    """What `dataset` is evaluated with.

    A setting that the dataset gives as null is unset: it takes neither evaluation's nor the rollout's value, but the
    one that does nothing, such as top_k -1.
    """
    rollout, data, reward = cfg.rollout, cfg.data, cfg.reward

    def pick(name: str, own: T | None, unset: T, *others: T | None) -> T:
        if dataset.gives(name):
            return unset if own is None else own
        return next((value for value in others if value is not None), unset)

    custom_rm_path = pick("custom_rm_path", dataset.custom_rm_path, None, reward.custom_rm_path)
    if dataset.rm_type is not None and not dataset.gives("custom_rm_path"):
        custom_rm_path = None
    return EvalSettings(
        name=dataset.name,
        path=dataset.path,
        n_samples_per_eval_prompt=pick(
            "n_samples_per_eval_prompt", dataset.n_samples_per_eval_prompt, 1, cfg.eval.n_samples_per_eval_prompt
        ),
        max_prompts=dataset.max_prompts,
        input_key=pick("input_key", dataset.input_key, "input", cfg.eval.input_key, data.input_key),
        label_key=pick("label_key", dataset.label_key, None, cfg.eval.label_key, data.label_key),
        tool_key=pick("tool_key", dataset.tool_key, None, cfg.eval.tool_key, data.tool_key),
        metadata_key=pick("metadata_key", dataset.metadata_key, "metadata", data.metadata_key),
        metadata_overrides=dataset.metadata_overrides or {},
        temperature=pick("temperature", dataset.temperature, 1.0, cfg.eval.temperature, rollout.temperature),
        top_p=pick("top_p", dataset.top_p, 1.0, cfg.eval.top_p, rollout.top_p),
        top_k=pick("top_k", dataset.top_k, -1, cfg.eval.top_k, rollout.top_k),
        stop=tuple(pick("stop", dataset.stop, [], rollout.stop)),
        stop_token_ids=tuple(pick("stop_token_ids", dataset.stop_token_ids, [], rollout.stop_token_ids)),
        min_new_tokens=pick("min_new_tokens", dataset.min_new_tokens, 0, cfg.eval.min_new_tokens),
        max_response_len=pick(
            "max_response_len",
            dataset.max_response_len,
            None,
            cfg.eval.max_response_len,
            rollout.max_response_len,
        ),
        max_prompt_len=pick(
            "max_prompt_len", dataset.max_prompt_len, None, cfg.eval.max_prompt_len, rollout.max_prompt_len
        ),
        max_context_len=pick(
            "max_context_len", dataset.max_context_len, None, cfg.eval.max_context_len, rollout.max_context_len
        ),
        custom_generate_function_path=pick(
            "custom_generate_function_path",
            dataset.custom_generate_function_path,
            None,
            rollout.custom_generate_function_path,
        ),
        rm_type=pick("rm_type", dataset.rm_type, None, reward.rm_type),
        custom_rm_path=custom_rm_path,
        reward_key=pick("reward_key", dataset.reward_key, None, reward.eval_reward_key, reward.reward_key),
    )
