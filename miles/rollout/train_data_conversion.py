"""From finished groups to the `TrainBatch` that the trainer gets."""

# B samples, T tokens of a sample, R its response tokens

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles.config.estimators import Baseline
from miles.core.plugins import describe_error
from miles.core.samples import Sample
from miles.core.train_batch import Column, TrainBatch
from miles.errors import HookError, TrainingError
from miles.rollout.base_types import RolloutGroup
from miles.rollout.groups import flatten, trajectories, trajectory_reward
from miles.rollout.overlong_penalty import OverlongPenalty, overlong_penalties
from miles.rollout.reward_normalization import Floats, normalize_rewards

RewardPostProcess = Callable[[list[Sample]], Any]


def to_train_batch(
    groups: Sequence[RolloutGroup],
    *,
    reward_key: str | None = None,
    baseline: Baseline | None = "mean_std",
    overlong: OverlongPenalty | None = None,
    require_rewards: bool = True,
    reward_post_process: RewardPostProcess | None = None,
    reward_post_process_path: str = "--custom-reward-post-process-path",
) -> TrainBatch:
    """Columns of all samples of `groups`, in order.

    `tokens` (token, int64) · `loss_mask` (response, float32; zero for `remove_sample`) · `rollout_log_probs`
    (response, float32; when every sample has them) · `reward` (sample, float32; compared within its prompt group) ·
    `raw_reward` (sample, float32) · `sample_index`, `group_index`, `trajectory` (sample, int64) · `truncated` (sample,
    float32) · `weight_version` (sample, int64; the oldest of its trainable tokens, -1 where there is none) · extra
    `metadata` (opaque; `sample.train_metadata`, {} for a sample without, when any has some).

    A trajectory whose reward is None was not scored and is not trained on: its mask is 0 throughout, and it enters
    neither mean nor deviation of its group. In `raw_reward` it has the mean of the scored samples, and so moves no mean.

    Args:
        reward_key: entry of reward objects that is trained on.
        baseline: what rewards are compared with in their group; None trains on the reward itself.
        overlong: taken off the rewards of long responses before they are compared; `raw_reward` stays as it is.
        require_rewards: refuse a batch in which no sample has a reward; otherwise the reward columns are then left
            out, as in supervised training.
        reward_post_process: takes the samples and returns `(raw, normalised)`, in place of the group normalisation.

    Raises TrainingError, naming the samples, on NaN or infinite values, lengths that disagree, a batch without rewards,
    and log-probs that only some samples have; HookError when the post-process function returns something else.
    """
    samples = [sample for group in groups for sample in flatten(group)]
    if not samples:
        raise TrainingError("the rollout returned no sample; there is nothing to train on")
    for sample in samples:
        _check(sample)
    group_B, trajectory_B = group_ids(groups)

    judged = require_rewards or any(s.reward is not None for s in samples)
    raw_B = reward_B = np.zeros(len(samples))
    scored_B = np.ones(len(samples), dtype=bool)
    if judged and reward_post_process is not None:
        raw_B, reward_B = _post_process(reward_post_process, reward_post_process_path, samples)
    elif judged:
        raw_B = _rewards(groups, reward_key)
        scored_B = ~np.isnan(raw_B)
        reward_B = np.where(scored_B, raw_B, 0.0)
        if overlong is not None:
            reward_B = reward_B - np.where(scored_B, overlong_penalties(groups, overlong), 0.0)
        if baseline is not None:
            trainable = [s.effective_response_length > 0 for s in samples]
            reward_B = normalize_rewards(
                reward_B,
                group_B=group_B,
                trajectory_B=trajectory_B,
                counted_B=[bool(scored) and some for scored, some in zip(scored_B, trainable, strict=True)],
                baseline=baseline,
            )
    columns = {
        "tokens": Column.from_rows([s.tokens for s in samples], "token", "int64"),
        "loss_mask": Column.from_rows(
            [_mask(s, scored=bool(scored)) for s, scored in zip(samples, scored_B, strict=True)], "response"
        ),
        "sample_index": _sample_column([_number(s.index, b) for b, s in enumerate(samples)], "int64"),
        "group_index": _sample_column(group_B, "int64"),
        "trajectory": _sample_column(trajectory_B, "int64"),
        "truncated": _sample_column([float(s.status is Sample.Status.TRUNCATED) for s in samples]),
        "weight_version": _sample_column([_number(s.oldest_weight_version, -1) for s in samples], "int64"),
    }
    if judged:
        columns["reward"] = _sample_column(reward_B)
        columns["raw_reward"] = _sample_column(_reported(raw_B, samples))
    log_probs = optional_rows(samples, "rollout_log_probs", lambda s: s.rollout_log_probs)
    if log_probs is not None:
        columns["rollout_log_probs"] = Column.from_rows(log_probs, "response")
    extra: dict[str, Column] = {}
    if any(s.train_metadata is not None for s in samples):
        extra["metadata"] = Column.from_rows([s.train_metadata or {} for s in samples], "opaque")
    return TrainBatch(columns=columns, extra=extra)


def optional_rows(samples: Sequence[Sample], name: str, get: Callable[[Sample], list[Any] | None]) -> list[Any] | None:
    """What `get` finds in each sample, or None when no sample has it; a sample with an empty response needs none.

    Decided from all samples, not from the first. Raises TrainingError naming those without when only some have it.
    """
    found = [get(s) for s in samples]
    if all(rows is None for rows in found):
        return None
    without = [s for s, rows in zip(samples, found, strict=True) if rows is None and s.response_length]
    if without:
        names = ", ".join(name_of(s) for s in without[:5]) + (" ..." if len(without) > 5 else "")
        raise TrainingError(
            f"{len(without)} of {len(samples)} samples have no {name}: {names}; "
            "the generate function must return them for every sample or for none"
        )
    return [rows or [] for rows in found]


def _sample_column(values: Any, dtype: str = "float32") -> Column:
    return Column.from_rows(list(values), "sample", dtype)


def _number(value: int | None, default: int) -> int:
    return default if value is None else value


def name_of(sample: Sample) -> str:
    """What messages call a sample."""
    return f"sample {sample.index} (group {sample.group_index})"


def _check(sample: Sample) -> None:
    try:
        sample.validate()
    except ValueError as error:
        raise TrainingError(f"{error}; mend the rollout or generate function that made this sample") from None
    if not sample.tokens:
        raise TrainingError(f"{name_of(sample)} has no tokens; the generate function must set sample.tokens")
    bad = [r for r, x in enumerate(sample.rollout_log_probs or []) if not math.isfinite(x)]
    if bad:
        raise TrainingError(
            f"{name_of(sample)}: rollout_log_probs is {(sample.rollout_log_probs or [])[bad[0]]} at response token "
            f"{bad[0]} ({len(bad)} such tokens); the engine's numbers are broken, look into its log"
        )


def _mask(sample: Sample, *, scored: bool) -> list[int]:
    if sample.remove_sample or not scored:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def group_ids(groups: Sequence[RolloutGroup]) -> tuple[list[int], list[int]]:
    """Group and trajectory of each sample; a group's position stands for a number that a data source did not set.

    Trajectories are numbered within the batch: names that a hook gave need to differ within their own group only.
    """
    group_B: list[int] = []
    trajectory_B: list[int] = []
    count = 0
    for position, group in enumerate(groups):
        indices = {s.group_index for s in flatten(group)}
        if len(indices) > 1:
            raise TrainingError(
                f"one group holds samples of the groups {sorted(map(str, indices))}; a group is the samples of one "
                "prompt, so that their rewards can be compared"
            )
        found = trajectories(group)
        numbers = {id(s): count + t for t, siblings in enumerate(found) for s in siblings}
        count += len(found)
        for sample in flatten(group):
            group_B.append(_number(sample.group_index, position))
            trajectory_B.append(numbers[id(sample)])
    return group_B, trajectory_B


def _rewards(groups: Sequence[RolloutGroup], reward_key: str | None) -> Floats:
    """One finite reward per sample, shape [B]; NaN where a trajectory was not scored."""
    by_sample = {
        id(s): trajectory_reward(siblings, reward_key)
        for group in groups
        for siblings in trajectories(group)
        for s in siblings
    }
    found = [by_sample[id(s)] for group in groups for s in flatten(group)]
    if all(reward is None for reward in found):
        raise TrainingError(
            f"none of the {len(found)} samples has a reward: the reward is None for all; check the reward function, or "
            "the rollout function that left it out"
        )
    return np.asarray([math.nan if reward is None else reward for reward in found], dtype=np.float64)


def _reported(raw_B: Floats, samples: list[Sample]) -> Floats:
    """`metadata["raw_reward"]` replaces the reward that is reported, not the one that is trained on.

    A sample that has none at all gets the mean of the others.
    """
    found_B = np.asarray([_reported_reward(s, float(r)) for s, r in zip(samples, raw_B, strict=True)])
    defined_B = ~np.isnan(found_B)
    return np.where(defined_B, found_B, found_B[defined_B].mean() if defined_B.any() else 0.0)


def _reported_reward(sample: Sample, raw: float) -> float:
    if "raw_reward" not in sample.metadata:
        return raw
    found = sample.metadata["raw_reward"]
    if found is None:
        return math.nan
    if isinstance(found, int | float | np.number) and math.isfinite(found):
        return float(found)
    raise TrainingError(
        f'{name_of(sample)}: metadata["raw_reward"] is {found!r:.80}, not a finite number, though it is what is reported'
    )


def _post_process(fn: RewardPostProcess, path: str, samples: list[Sample]) -> tuple[Floats, Floats]:
    try:
        returned = fn(samples)
    except HookError:
        raise
    except Exception as error:
        raise HookError(path, describe_error(error), "mend this function") from error
    try:
        raw_B, reward_B = (np.asarray([float(x) for x in part], dtype=np.float64) for part in returned)
    except (TypeError, ValueError) as error:
        problem = f"returned {returned!r:.80}: {error}"
        raise HookError(path, problem, "return (raw, normalised), each with one number per sample") from error
    for what, values_B in (("raw", raw_B), ("normalised", reward_B)):
        if len(values_B) != len(samples):
            raise HookError(
                path, f"returned {len(values_B)} {what} rewards for {len(samples)} samples", "return one per sample"
            )
        if not np.isfinite(values_B).all():
            names = ", ".join(name_of(samples[int(b)]) for b in np.flatnonzero(~np.isfinite(values_B))[:5])
            raise TrainingError(f"{path}: the {what} reward is not finite for {names}")
    return raw_B, reward_B
