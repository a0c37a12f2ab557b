"""Results and metrics of one evaluation dataset."""

# P prompts, n samples of a prompt

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from miles.config.eval_settings import EvalSettings
from miles.core.samples import Sample
from miles.rollout.inference_rollout.error_context import with_context
from miles.rollout.metrics import length_metrics, mean_pass_at_k, reported_reward

logger = logging.getLogger(__name__)

Outcome = list[Sample] | Exception
"""The samples of one finished trajectory, or what went wrong."""


def summarize(
    settings: EvalSettings, outcomes_P_n: list[list[Outcome]], num_dropped: int = 0
) -> tuple[dict[str, Any], dict[str, float]]:
    """Results and metrics of one dataset, of which `num_dropped` prompts were too long.

    Results: `rewards` (float or None), `truncated` and `samples`, one entry per finished trajectory in order, and
    `errors`, the texts of those that failed.

    Metrics under `eval/NAME`: the mean of the defined rewards (left out when there is none), `/num_prompts`,
    `/num_samples`, `/failed` (without a response or with an error in the reward), `/unscored` (failed, or with a reward
    that is None, NaN or infinite), `/none_reward_ratio` (unscored of all), and of those that finished `/truncated_ratio`
    and `/response_len/{mean,median,p95,max}`; `/pass@k` for powers of two up to the dataset's n, over prompts whose
    samples were all scored; `/dropped_prompts` when there are any.

    Raises the first error when every sample failed.
    """
    key = f"eval/{settings.name}"
    flat = [outcome for outcomes in outcomes_P_n for outcome in outcomes]
    finished = [outcome for outcome in flat if isinstance(outcome, list)]
    errors = [outcome for outcome in flat if isinstance(outcome, Exception)]
    if errors and not finished:
        context = (
            f"evaluation of {settings.name} ({settings.path}): all {len(errors)} samples failed; this is the first"
        )
        raise with_context(errors[0], context) from errors[0]
    if errors:
        logger.warning("%s: %d of %d samples failed, the first with: %s", key, len(errors), len(flat), errors[0])
    rewards_P_n = [[_reward(outcome, settings.reward_key) for outcome in outcomes] for outcomes in outcomes_P_n]
    scored = [reward for rewards in rewards_P_n for reward in rewards if reward is not None]
    truncated = [any(s.status is Sample.Status.TRUNCATED for s in samples) for samples in finished]
    unscored = len(flat) - len(scored)
    metrics = {
        f"{key}/num_prompts": float(len(outcomes_P_n)),
        f"{key}/num_samples": float(len(flat)),
        f"{key}/failed": float(len(errors)),
        f"{key}/unscored": float(unscored),
        f"{key}/none_reward_ratio": unscored / len(flat),
        f"{key}/truncated_ratio": float(np.mean(truncated)),
        **length_metrics(f"{key}/response_len", [sum(s.response_length for s in samples) for samples in finished]),
    }
    if scored:
        metrics[key] = float(np.mean(scored))
    metrics |= {f"{key}/pass@{k}": value for k, value in mean_pass_at_k(rewards_P_n).items()}
    if num_dropped:
        metrics[f"{key}/dropped_prompts"] = float(num_dropped)
    data = {
        "rewards": [_reward(samples, settings.reward_key) for samples in finished],
        "truncated": truncated,
        "samples": [samples[0] if len(samples) == 1 else samples for samples in finished],
        "errors": [f"{type(error).__name__}: {error}" for error in errors],
    }
    return data, metrics


def _reward(outcome: Outcome, reward_key: str | None) -> float | None:
    """The reward of a trajectory; its last sample's, where only that has one."""
    if not isinstance(outcome, list):
        return None
    found = [reported_reward(sample, reward_key) for sample in outcome]
    return next((reward for reward in reversed(found) if reward is not None), None)
