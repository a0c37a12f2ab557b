"""One evaluation dataset, ready to be evaluated: its prompts, the settings that hold for it, and its rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.config.eval_settings import EvalSettings, eval_datasets, settings_of
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.errors import ConfigError, DataError, Issue
from miles.rollout.inference_rollout.state import GenerateState
from miles.rollout.prompts import PromptFile, PromptFormat, load_prompts
from miles.rollout.rm_hub.hub import RewardHub
from miles.rollout.rm_hub.labels import label_check
from miles.utils.hf import context_length

_RewardName = tuple[str | None, str | None]
"""`--rm-type` and `--reward-key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDataset:
    """A dataset whose file is read."""

    settings: EvalSettings
    config: RunConfig
    """The run's configuration with the dataset's settings in place of the rollout's: what its hooks see as `args`."""
    file: PromptFile
    max_context_len: int | None
    reward_hub: RewardHub | None
    """Rewards of its own; None takes the run's. A custom function is called with the dataset's `args`."""

    def state_from(self, state: GenerateState) -> GenerateState:
        """`state` with the settings of this dataset."""
        return state.derived(
            HookArgs(self.config, state.args.facts),
            min_new_tokens=self.settings.min_new_tokens,
            max_context_len=self.max_context_len,
            reward_hub=self.reward_hub,
        )


def prepare_datasets(args: Any, tokenizer: Any) -> list[PreparedDataset]:
    """Every evaluation dataset of the run; raises ConfigError, and DataError that names dataset and file."""
    config: RunConfig = args.config
    _check_names(config)
    built_in: dict[_RewardName, RewardHub] = {}
    return [_prepare(args, settings_of(config, dataset), tokenizer, built_in) for dataset in eval_datasets(config)]


def _prepare(
    args: Any, settings: EvalSettings, tokenizer: Any, built_in: dict[_RewardName, RewardHub]
) -> PreparedDataset:
    context = settings.max_context_len or context_length(args.hf_checkpoint)
    config = _config_for(args.config, settings, context)
    own_args = HookArgs(config, args.facts)
    hub, name = None, (settings.rm_type, settings.reward_key)
    if settings.custom_rm_path is not None:
        hub = RewardHub(own_args)
    elif args.custom_rm_path is not None or name != (args.rm_type, args.eval_reward_key):
        hub = built_in.get(name) or RewardHub(own_args)
        built_in[name] = hub
    return PreparedDataset(
        settings=settings,
        config=config,
        file=_read(settings, PromptFormat.of(own_args, context).checking(label_check(own_args)), tokenizer),
        max_context_len=context,
        reward_hub=hub,
    )


def _config_for(config: RunConfig, settings: EvalSettings, context: int | None) -> RunConfig:
    max_response_len = settings.max_response_len or context
    if max_response_len is None:
        problem = f"dataset {settings.name} unsets max_response_len, and the model's config.json names no limit either"
        raise ConfigError([Issue("eval.datasets", problem, "set its max_response_len or max_context_len")])
    changes: Mapping[str, dict[str, Any]] = {
        "data": {
            "input_key": settings.input_key,
            "label_key": settings.label_key,
            "tool_key": settings.tool_key,
            "metadata_key": settings.metadata_key,
        },
        "rollout": {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "stop": list(settings.stop),
            "stop_token_ids": list(settings.stop_token_ids),
            "max_response_len": max_response_len,
            "max_prompt_len": settings.max_prompt_len,
            "max_context_len": settings.max_context_len,
            "custom_generate_function_path": settings.custom_generate_function_path,
        },
        "reward": {
            "rm_type": settings.rm_type,
            "custom_rm_path": settings.custom_rm_path,
            "reward_key": settings.reward_key,
            "eval_reward_key": settings.reward_key,
        },
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections)


def _read(settings: EvalSettings, format: PromptFormat, tokenizer: Any) -> PromptFile:
    try:
        return load_prompts(settings.path, format, tokenizer)
    except DataError as error:
        problem = f"{error.problem} (evaluation dataset {settings.name!r})"
        raise DataError(error.path, problem, error.fix, line=error.line) from None


def _check_names(config: RunConfig) -> None:
    words = config.eval.prompt_data
    if len(words) % 2:
        problem = f"{len(words)} values are not pairs"
        raise ConfigError([Issue("eval.prompt_data", problem, "give name and file of each dataset")])
    names = [dataset.name for dataset in eval_datasets(config)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problem = f"{', '.join(twice)} is the name of several datasets"
        raise ConfigError([Issue("eval.datasets", problem, "give each a name of its own; it is the metric's name")])
