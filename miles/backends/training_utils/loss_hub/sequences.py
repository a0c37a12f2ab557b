"""Means over the trainable tokens of a trajectory, also when it lies in several micro-batches."""

# N tokens of this micro-batch, M tokens of its trajectories in other ones, S trajectories

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded at +-20 before they are exponentiated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """Every trainable token that counts in a mean: those of the micro-batch first, then the others. No gradients."""

    log_ratio_A: Tensor
    """log(current / old), bounded; [N + M]."""
    advantages_A: Tensor
    weights_A: Tensor
    """0 for tokens that count nowhere."""
    index_A: Tensor
    """Number of the trajectory, from 0."""
    num: int
    """Trajectories."""
    num_here: int
    """N."""

    def mean_N(self, values_A: Tensor) -> Tensor:
        """For each token of the micro-batch the mean of its trajectory, in which a token counts by its weight."""
        total_S = self._sum_S(self.weights_A)
        mean_S = self._sum_S(self.weights_A.double() * values_A.double()) / total_S.clamp_min(1e-300)
        return mean_S[self.index_A[: self.num_here]].to(values_A.dtype)

    def _sum_S(self, values_A: Tensor) -> Tensor:
        zeros_S = torch.zeros(self.num, dtype=torch.float64, device=values_A.device)
        return zeros_S.index_add(0, self.index_A, values_A.double())


def sequences(
    log_ratio_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    trajectory_N: Tensor,
    other: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Sequences:
    """Put tokens and the same four columns of `other` together; masked tokens must hold finite values."""
    columns = (log_ratio_N.detach(), advantages_N, weights_N, trajectory_N)
    if other is not None:
        columns = tuple(torch.cat(pair) for pair in zip(columns, other, strict=True))
    log_ratio_A, advantages_A, weights_A, trajectory_A = columns
    found, index_A = torch.unique(trajectory_A, return_inverse=True)
    return Sequences(
        log_ratio_A=log_ratio_A,
        advantages_A=advantages_A,
        weights_A=weights_A,
        index_A=index_A,
        num=len(found),
        num_here=len(log_ratio_N),
    )


def effective_sizes(ratio_N: Tensor, counted_N: Tensor, sample_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of (sum of ratios)^2 / (tokens x sum of ratios^2) over samples with a token that counts, and their number.

    1 where all ratios of a sample are equal, 1 / tokens where one outweighs all others.
    """
    found, index_N = torch.unique(sample_N[counted_N], return_inverse=True)
    zeros_B = torch.zeros(len(found), dtype=torch.float64, device=ratio_N.device)
    ratio_N = ratio_N[counted_N].double()
    sum_B, square_B = (zeros_B.index_add(0, index_N, x_N) for x_N in (ratio_N, ratio_N.square()))
    tokens_B = zeros_B.index_add(0, index_N, torch.ones_like(ratio_N))
    return (sum_B.square() / (tokens_B * square_B)).sum(), torch.tensor(float(len(found)))
