"""Metrics of a collected batch, and the rows written to `rollouts/*.jsonl`."""

# B samples, P prompt groups, G trajectories of a group

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from miles.core.samples import Sample, reward_value
from miles.rollout.base_types import RolloutGroup
from miles.rollout.groups import flatten, trajectories

REPETITION_TAIL_CHARS = 10_000
REPETITION_RATIO = 10.0


def rollout_metrics(
    groups: Sequence[RolloutGroup],
    *,
    reward_key: str | None = None,
    elapsed_s: float | None = None,
    passrate: bool = False,
) -> dict[str, float]:
    """Metrics of finished groups, all under `rollout/`.

    `elapsed_s`, the seconds spent on collecting them, adds `rollout/response_tokens_per_s`, and `passrate`
    `rollout/pass@k`. A metric without any defined value is left out: rewards that are None, NaN or infinite enter none,
    and are counted in `rollout/unscored`. `metadata["raw_reward"]` replaces a reward in the mean.
    """
    samples = [s for group in groups for s in flatten(group)]
    if not samples:
        return {}
    lengths_B = np.asarray([s.response_length for s in samples], dtype=np.float64)
    metrics = {
        "rollout/num_samples": float(len(samples)),
        "rollout/response_len/mean": float(lengths_B.mean()),
        "rollout/response_len/median": float(np.median(lengths_B)),
        "rollout/response_len/max": float(lengths_B.max()),
        "rollout/response_len/min": float(lengths_B.min()),
        "rollout/response_tokens": float(lengths_B.sum()),
        "rollout/total_tokens": float(sum(len(s.tokens) for s in samples)),
        "rollout/truncated_ratio": _mean(s.status is Sample.Status.TRUNCATED for s in samples),
        "rollout/removed_ratio": _mean(s.remove_sample for s in samples),
        "rollout/repetition_frac": _mean(is_repetitive(s.response) for s in samples),
    }
    if elapsed_s:
        metrics["rollout/response_tokens_per_s"] = float(lengths_B.sum()) / elapsed_s
    if passrate:
        rewards_P_G = [[reported_reward(t[0], reward_key) for t in trajectories(group)] for group in groups if group]
        metrics |= {f"rollout/pass@{k}": value for k, value in mean_pass_at_k(rewards_P_G).items()}
    return metrics | _reward_metrics(groups, reward_key) | _version_metrics(samples) | _cache_metrics(samples)


def _reward_metrics(groups: Sequence[RolloutGroup], reward_key: str | None) -> dict[str, float]:
    rewards_P_G = [
        [defined_reward(siblings[0], reward_key) for siblings in trajectories(group)] for group in groups if group
    ]
    flat = [reported_reward(siblings[0], reward_key) for group in groups for siblings in trajectories(group)]
    scored = [r for r in flat if r is not None]
    if not scored:
        return {}
    metrics = {"rollout/reward": float(np.mean(scored))}
    if len(scored) < len(flat):
        metrics["rollout/unscored"] = float(len(flat) - len(scored))
    complete = [[r for r in rewards_G if r is not None] for rewards_G in rewards_P_G if None not in rewards_G]
    several = [rewards_G for rewards_G in complete if len(rewards_G) > 1]
    if several:
        metrics["rollout/zero_std"] = _mean(len(set(rewards_G)) == 1 for rewards_G in several)
    if complete:
        metrics["rollout/all_one"] = _mean(set(rewards_G) == {1.0} for rewards_G in complete)
        metrics["rollout/all_zero"] = _mean(set(rewards_G) == {0.0} for rewards_G in complete)
    correct = [
        sum(s.response_length for s in siblings)
        for group in groups
        for siblings in trajectories(group)
        if defined_reward(siblings[0], reward_key) == 1.0
    ]
    if correct:
        metrics["rollout/response_len/correct_mean"] = float(np.mean(correct))
    return metrics


def _version_metrics(samples: list[Sample]) -> dict[str, float]:
    oldest = [v for v in (s.oldest_weight_version for s in samples) if v is not None]
    if not oldest:
        return {}
    return {
        "rollout/weight_version/min": float(min(oldest)),
        "rollout/weight_version/max": float(max(oldest)),
        "rollout/mixed_version_ratio": _mean(len(set(s.weight_versions)) > 1 for s in samples),
    }


def _cache_metrics(samples: list[Sample]) -> dict[str, float]:
    prompt_tokens = sum(len(s.tokens) - s.response_length for s in samples)
    if not prompt_tokens:
        return {}
    return {"rollout/prefix_cache_hit_rate": sum(s.cached_tokens for s in samples) / prompt_tokens}


def _mean(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found)


def eval_metrics(data: Mapping[str, Mapping[str, Any]], reward_key: str | None) -> dict[str, float]:
    """Metrics of an evaluation function that returned results without any, from its `rewards` and `truncated`.

    `eval/NAME` is the mean of the defined rewards, left out when there is none; `/unscored` counts the others, and
    `/none_reward_ratio` is their share.
    """
    metrics: dict[str, float] = {}
    for name, result in data.items():
        found = [_defined(reward, reward_key) for reward in result.get("rewards", [])]
        scored = [reward for reward in found if reward is not None]
        if scored:
            metrics[f"eval/{name}"] = float(np.mean(scored))
        metrics[f"eval/{name}/unscored"] = float(len(found) - len(scored))
        if found:
            metrics[f"eval/{name}/none_reward_ratio"] = 1 - len(scored) / len(found)
        if len(truncated := result.get("truncated", [])):
            metrics[f"eval/{name}/truncated_ratio"] = _mean(map(bool, truncated))
    return metrics


def reported_reward(sample: Sample, reward_key: str | None) -> float | None:
    """What is reported as the sample's reward: `metadata["raw_reward"]` where it has one, else its reward, if finite."""
    if "raw_reward" in sample.metadata:
        return _defined(sample.metadata["raw_reward"], None)
    return defined_reward(sample, reward_key)


def defined_reward(sample: Sample, reward_key: str | None) -> float | None:
    """The reward as a float, or None where there is no finite number."""
    return _defined(sample.reward, reward_key)


def _defined(reward: Any, reward_key: str | None) -> float | None:
    try:
        return reward_value(reward, reward_key)
    except ValueError:
        return None


def is_repetitive(text: str) -> bool:
    """Whether the last 10 000 characters of a text shrink more than tenfold under zlib: it goes round in circles."""
    tail = text[-REPETITION_TAIL_CHARS:].encode()
    return bool(tail) and len(tail) / len(zlib.compress(tail)) > REPETITION_RATIO


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of k samples, drawn of `num_samples` without replacement, is correct.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, section 2.1). Raises
    ValueError unless 1 <= k <= num_samples and 0 <= num_correct <= num_samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} is not defined for {num_correct} correct of {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(rewards_P_n: Iterable[Sequence[float | None]]) -> dict[int, float]:
    """`pass_at_k` for k = 1, 2, 4, ..., each averaged over the prompts with at least k samples, all of them scored.

    A sample is correct when its reward is 1. Empty when no prompt is complete: one sample that nobody judged may have
    been the correct one.
    """
    complete = [list(rewards) for rewards in rewards_P_n if rewards and None not in rewards]
    largest = max(map(len, complete), default=0)
    found: dict[int, float] = {}
    for k in (1 << e for e in range(largest.bit_length())):
        values = [pass_at_k(len(r), sum(x == 1.0 for x in r), k) for r in complete if len(r) >= k]
        if values:
            found[k] = float(np.mean(values))
    return found


def length_metrics(key: str, lengths: Sequence[int]) -> dict[str, float]:
    """`KEY/mean`, `/median`, `/p95` and `/max` of some lengths; none of nothing."""
    if not lengths:
        return {}
    values = np.asarray(lengths, dtype=np.float64)
    return {
        f"{key}/mean": float(values.mean()),
        f"{key}/median": float(np.median(values)),
        f"{key}/p95": float(np.percentile(values, 95)),
        f"{key}/max": float(values.max()),
    }


def finite_only(metrics: Mapping[str, float]) -> tuple[dict[str, float], int]:
    """The metrics with a finite value, and how many were left out."""
    kept = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
    return kept, len(metrics) - len(kept)


def dump_rows(groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
    """One JSON-ready object per sample, for a line of `rollouts/*.jsonl`."""
    return [_row(sample) for group in groups for sample in flatten(group)]


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "group_index": sample.group_index,
        "sample_index": sample.index,
        "trajectory": sample.trajectory,
        "prompt": sample.prompt_text,
        "response": sample.response,
        "label": _json_ready(sample.label),
        "reward": _json_ready(sample.reward),
        "status": sample.status.value,
        "removed": sample.remove_sample,
        "prompt_length": len(sample.tokens) - sample.response_length,
        "response_length": sample.response_length,
        "trainable_length": 0 if sample.remove_sample else sample.effective_response_length,
        "weight_versions": sample.weight_versions,
        "metadata": _json_ready(sample.metadata),
    }


def _json_ready(value: Any) -> Any:
    """A copy that JSON can hold: NaN and infinities become null, unknown objects their text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {str(k): _json_ready(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple | np.ndarray):
        return [_json_ready(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool) or value is None else str(value)
