"""How a batch is split: into optimizer steps, over ranks, into packs within a token budget. None of it changes the result."""

# B samples of the batch

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles.backends.training_utils.balancing import first_fit_decreasing, karmarkar_karp
from miles.errors import TrainingError

Samples = NDArray[np.int64]
"""Indices of samples in the batch."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: its samples in order, and `micro_batches[rank]`, the same number for every rank.

    A micro-batch is empty only when a step has fewer samples to run than ranks.
    """

    samples: Samples
    micro_batches: list[list[Samples]]


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """Floating-point operations of a forward pass over a sequence of T tokens: `linear` x T + `quadratic` x T^2.

    Of a decoder, `linear` is twice the parameters that multiply a token, and `quadratic` 2 x layers x heads x head size:
    scores and weighted values are 2 operations each, half of them behind the causal mask. A backward pass is twice that.
    """

    linear: float
    quadratic: float

    def __add__(self, other: SequenceFlops) -> SequenceFlops:
        """Of two models that both pass over the sequence."""
        return SequenceFlops(self.linear + other.linear, self.quadratic + other.quadratic)

    def __call__(self, lengths_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of sequences of these lengths, each alone, as it is in a pack."""
        lengths = lengths_B.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths * lengths


def split_into_steps(
    trajectory_B: NDArray[np.int64],
    *,
    global_batch_size: int | None,
    num_steps: int | None,
    allow_partial: bool = False,
    dynamic: bool = False,
) -> list[Samples]:
    """Samples of each optimizer step: `global_batch_size` trajectories each, in order of first appearance.

    With `allow_partial` the last step takes what is left over. Without `global_batch_size` the batch is cut into `num_steps`
    equal steps (default 1); with `dynamic` into about equal ones, however many trajectories there are. Raises TrainingError
    when the trajectories cannot be divided so.
    """
    _, first, inverse = np.unique(trajectory_B, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    position_B = order[inverse]
    total = len(first)
    if total == 0:
        raise TrainingError(
            "the batch has 0 trajectories: there is nothing to train on\n    fix: let the rollout return samples"
        )
    if global_batch_size is None:
        parts = min(num_steps or 1, total) if dynamic else num_steps or 1
        if not dynamic and total % parts:
            raise TrainingError(
                f"the batch has {total} trajectories, which cannot be cut into {parts} equal optimizer steps"
                "\n    fix: choose --num-steps-per-rollout so that it divides the trajectories of a rollout, or pass "
                "--use-dynamic-global-batch-size to take steps of about equal size"
            )
        step_B = position_B * parts // total
    else:
        if not allow_partial and total % global_batch_size:
            raise TrainingError(
                f"the batch has {total} trajectories, which --global-batch-size {global_batch_size} does not divide"
                "\n    fix: return as many trajectories as rollout-batch-size x n-samples-per-prompt, change "
                "--global-batch-size, or pass --allow-partial-train-step to train on what is left over"
            )
        step_B = position_B // global_batch_size
    return [np.flatnonzero(step_B == step) for step in range(int(step_B.max()) + 1)]


def split_into_micro_batches(
    samples: Samples,
    lengths_B: NDArray[np.int64],
    max_tokens: int,
    *,
    multiple_of: int = 1,
    trajectory_B: NDArray[np.int64] | None = None,
    cost_B: NDArray[np.float64] | None = None,
) -> list[Samples]:
    """Pack samples into micro-batches of at most `max_tokens` tokens, as few as first-fit decreasing finds.

    Their number is raised to a multiple of `multiple_of` by splitting the costliest, by `cost_B` (default: tokens); only when
    there are fewer samples some are empty. Samples of one trajectory stay together where the budget and the number allow.
    Raises TrainingError naming a sample that alone has more tokens.
    """
    cost_B = lengths_B.astype(np.float64) if cost_B is None else cost_B
    if len(samples) and lengths_B[samples].max() > max_tokens:
        longest = samples[np.argmax(lengths_B[samples])]
        raise TrainingError(
            f"sample {int(longest)} of the batch has {int(lengths_B[longest])} tokens, more than a micro-batch may "
            f"hold ({max_tokens})\n    fix: raise --max-tokens-per-gpu, or bound prompts and responses"
        )
    units = _units(samples, lengths_B, max_tokens, trajectory_B)
    tokens = [int(lengths_B[unit].sum()) for unit in units]
    bins = [[units[i] for i in part] for part in first_fit_decreasing(tokens, max_tokens)]
    wanted = max(1, -(-len(bins) // multiple_of)) * multiple_of
    while len(bins) < wanted:
        splittable = [i for i, part in enumerate(bins) if sum(map(len, part)) > 1]
        if not splittable:
            bins += [[] for _ in range(wanted - len(bins))]
            break
        costliest = max(splittable, key=lambda i: float(sum(cost_B[unit].sum() for unit in bins[i])))
        part = bins[costliest]
        part = part if len(part) > 1 else [unit[i : i + 1] for unit in part for i in range(len(unit))]
        halves = karmarkar_karp([float(cost_B[unit].sum()) for unit in part], 2)
        bins[costliest : costliest + 1] = [[part[i] for i in half] for half in halves]
    return [np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *part])) for part in bins]


def _units(
    samples: Samples, lengths_B: NDArray[np.int64], max_tokens: int, trajectory_B: NDArray[np.int64] | None
) -> list[Samples]:
    """What is packed as one: a trajectory that fits into the budget, otherwise each of its samples."""
    if trajectory_B is None:
        return [samples[i : i + 1] for i in range(len(samples))]
    members: dict[int, list[int]] = {}
    for sample, trajectory in zip(samples.tolist(), trajectory_B[samples].tolist(), strict=True):
        members.setdefault(trajectory, []).append(sample)
    units: list[Samples] = []
    for group in members.values():
        whole = np.asarray(group, dtype=np.int64)
        fits = lengths_B[whole].sum() <= max_tokens
        units += [whole] if fits else [whole[i : i + 1] for i in range(len(whole))]
    return units


def share_out(
    micro_batches: Sequence[Samples], cost_B: NDArray[np.float64], world_size: int, *, balanced: bool
) -> list[list[Samples]]:
    """Micro-batches of each rank, equally many, the costliest first: ranks wait for each other in every one of them.

    In turn, or `balanced`: so that ranks' total costs are about equal. `world_size` divides their number.
    """
    costs = [float(cost_B[part].sum()) for part in micro_batches]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    if balanced:
        shares = karmarkar_karp(costs, world_size)
    else:
        shares = [order[rank::world_size] for rank in range(world_size)]
    return [[micro_batches[i] for i in sorted(share, key=lambda i: (-costs[i], i))] for share in shares]


def plan_steps(
    trajectory_B: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    trainable_B: NDArray[np.bool_],
    *,
    global_batch_size: int | None,
    num_steps: int | None,
    world_size: int,
    max_tokens: int,
    allow_partial: bool = False,
    dynamic: bool = False,
    balance_cost_B: NDArray[np.float64] | None = None,
) -> list[StepPlan]:
    """Plan every optimizer step of a batch, for all ranks at once, so that ranks agree without talking.

    `balance_cost_B` is what ranks are to have about equally much of; without it micro-batches go round in turn. Samples
    without a trainable token are in `StepPlan.samples` but in no micro-batch.
    """
    cost_B = lengths_B.astype(np.float64) if balance_cost_B is None else balance_cost_B
    plans: list[StepPlan] = []
    for samples in split_into_steps(
        trajectory_B,
        global_batch_size=global_batch_size,
        num_steps=num_steps,
        allow_partial=allow_partial,
        dynamic=dynamic,
    ):
        parts = split_into_micro_batches(
            samples[trainable_B[samples]],
            lengths_B,
            max_tokens,
            multiple_of=world_size,
            trajectory_B=trajectory_B,
            cost_B=cost_B,
        )
        plans.append(StepPlan(samples, share_out(parts, cost_B, world_size, balanced=balance_cost_B is not None)))
    return plans
