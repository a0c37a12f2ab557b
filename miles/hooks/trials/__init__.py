"""The contract tests of each hook, by the flag that names it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from miles.core.hook_contracts import GROUP_REWARD
from miles.hooks.trial import Trial
from miles.hooks.trials.conversion import convert_samples, reward_post_process
from miles.hooks.trials.data import buffer_filter, data_source
from miles.hooks.trials.filters import all_samples, dynamic_filter, sample_filter
from miles.hooks.trials.metrics import eval_log, rollout_log
from miles.hooks.trials.reward import group_reward, reward, sample_hook
from miles.hooks.trials.rollout import eval_rollout, generate, rollout

TRIALS: dict[str, Callable[[Trial], Coroutine[Any, Any, None]]] = {
    "--data-source-path": data_source,
    "--buffer-filter-path": buffer_filter,
    "--rollout-function-path": rollout,
    "--custom-generate-function-path": generate,
    "--rollout-sample-hook-path": sample_hook,
    "--custom-rm-path": reward,
    GROUP_REWARD: group_reward,
    "--dynamic-sampling-filter-path": dynamic_filter,
    "--rollout-sample-filter-path": sample_filter,
    "--rollout-all-samples-process-path": all_samples,
    "--eval-function-path": eval_rollout,
    "--custom-reward-post-process-path": reward_post_process,
    "--custom-convert-samples-to-train-data-path": convert_samples,
    "--custom-rollout-log-function-path": rollout_log,
    "--custom-eval-rollout-log-function-path": eval_log,
}
"""Those of losses are not here: `miles doctor loss` trains with them."""
