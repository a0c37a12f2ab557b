"""How a batch is split: into optimizer steps, over ranks, into padded micro-batches. None of it changes the result."""

# B samples of the batch

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles.errors import TrainingError

Samples = NDArray[np.int64]
"""Indices of samples in the batch."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: its samples in order, and `micro_batches[rank]`, the same number for every rank, maybe empty ones."""

    samples: Samples
    micro_batches: list[list[Samples]]


def split_into_steps(
    trajectory_B: NDArray[np.int64], *, global_batch_size: int | None, num_steps: int | None
) -> list[Samples]:
    """Samples of each optimizer step: `global_batch_size` trajectories each, in order of first appearance.

    Without `global_batch_size` the batch is cut into `num_steps` equal steps (default 1). Raises TrainingError when the
    trajectories cannot be divided so.
    """
    _, first, inverse = np.unique(trajectory_B, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    position_B = order[inverse]
    total = len(first)
    if global_batch_size is None:
        parts = num_steps or 1
        if total == 0 or total % parts:
            raise TrainingError(
                f"the batch has {total} trajectories, which cannot be cut into {parts} equal optimizer steps"
                "\n    fix: choose --num-steps-per-rollout so that it divides the trajectories of a rollout"
            )
        global_batch_size = total // parts
    elif total == 0 or total % global_batch_size:
        raise TrainingError(
            f"the batch has {total} trajectories, which --global-batch-size {global_batch_size} does not divide"
            "\n    fix: return as many trajectories as rollout-batch-size x n-samples-per-prompt, or change --global-batch-size"
        )
    step_B = position_B // global_batch_size
    return [np.flatnonzero(step_B == step) for step in range(total // global_batch_size)]


def split_over_ranks(
    samples: Samples, trajectory_B: NDArray[np.int64], lengths_B: NDArray[np.int64], world_size: int
) -> list[Samples]:
    """Samples of each rank: whole trajectories, the longest first, each to the rank with the fewest tokens so far."""
    if world_size == 1:
        return [samples]
    members: dict[int, list[int]] = {}
    for sample in samples.tolist():
        members.setdefault(int(trajectory_B[sample]), []).append(sample)
    by_size = sorted(members.values(), key=lambda group: -int(lengths_B[group].sum()))
    loads = [(0, 0, rank) for rank in range(world_size)]
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for group in by_size:
        tokens, count, rank = heapq.heappop(loads)
        ranks[rank] += group
        heapq.heappush(loads, (tokens + int(lengths_B[group].sum()), count + len(group), rank))
    return [np.asarray(sorted(rank), dtype=np.int64) for rank in ranks]


def split_into_micro_batches(samples: Samples, lengths_B: NDArray[np.int64], max_tokens: int) -> list[Samples]:
    """Cut samples, longest first, into micro-batches whose rows times longest row stay within `max_tokens`.

    Raises TrainingError naming a sample that alone has more tokens.
    """
    ordered = samples[np.argsort(-lengths_B[samples], kind="stable")]
    if len(ordered) and lengths_B[ordered[0]] > max_tokens:
        raise TrainingError(
            f"sample {int(ordered[0])} of the batch has {int(lengths_B[ordered[0]])} tokens, more than a micro-batch may "
            f"hold ({max_tokens})\n    fix: raise --max-tokens-per-gpu, or bound prompts and responses"
        )
    parts: list[Samples] = []
    start = 0
    while start < len(ordered):
        rows = max_tokens // max(1, int(lengths_B[ordered[start]]))
        parts.append(ordered[start : start + rows])
        start += rows
    return parts


def plan_steps(
    trajectory_B: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    trainable_B: NDArray[np.bool_],
    *,
    global_batch_size: int | None,
    num_steps: int | None,
    world_size: int,
    max_tokens: int,
) -> list[StepPlan]:
    """Plan every optimizer step of a batch, for all ranks at once, so that ranks agree without talking.

    Samples without a trainable token are in `StepPlan.samples` but in no micro-batch.
    """
    plans: list[StepPlan] = []
    for samples in split_into_steps(trajectory_B, global_batch_size=global_batch_size, num_steps=num_steps):
        useful = samples[trainable_B[samples]]
        shares = split_over_ranks(useful, trajectory_B, lengths_B, world_size)
        ranks = [split_into_micro_batches(share, lengths_B, max_tokens) for share in shares]
        plans.append(StepPlan(samples, pad_micro_batches(ranks)))
    return plans


def pad_micro_batches(ranks: Sequence[list[Samples]]) -> list[list[Samples]]:
    """Append empty micro-batches until every rank has as many as the longest, and at least one."""
    most = max(1, *(len(parts) for parts in ranks))
    empty = np.zeros(0, dtype=np.int64)
    return [parts + [empty] * (most - len(parts)) for parts in ranks]
