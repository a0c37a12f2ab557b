"""What goes into an advantage estimator and what comes out."""

# B samples, R response tokens of all samples end to end, N trainable ones by trajectory, S trajectories that have any

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """A whole batch: every rank has all of it, so that nothing has to be exchanged. Masked tokens are not read."""

    rewards_B: Tensor
    """One reward per sample, compared within its group already where the estimator does so; floating point."""
    trajectory_B: Tensor
    """Whole numbers. Samples that share one are parts of one trajectory, in the order of the batch; see `turns`."""
    group_B: Tensor
    """Whole numbers. Trajectories that share one answer the same prompt."""
    sample_index_B: Tensor
    """Names of the samples, for messages."""
    sample_of_R: Tensor
    """Which sample a token belongs to, from 0 to B - 1; whole numbers, ascending."""
    mask_R: Tensor
    """0 where a token is not trained on."""
    kl_R: Tensor | None = None
    """Estimated divergence from the reference model at each token, in nats; read when `kl_coef` is not 0."""
    values_R: Tensor | None = None
    """A critic's value before each token, in units of the reward."""
    gamma: float = 1.0
    """What a reward keeps of its worth for every trainable token between it and a token."""
    lam: float = 1.0
    """Lambda of GAE: 0 trusts the critic's value of the next token, 1 only what was really earned."""
    kl_coef: float = 0.0
    """Weight of `kl_R` against the reward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageOutput:
    """Per-token results, 0 where a token is masked, of the rewards' data type."""

    advantages_R: Tensor
    returns_R: Tensor | None = None
    """What a critic is trained towards; None where there is none."""


class Trajectories:
    """Trainable tokens with those of a trajectory end to end, whatever samples they are spread over."""

    def __init__(self, inputs: AdvantageInputs) -> None:
        trainable = torch.nonzero(inputs.mask_R).flatten()
        trajectory_N = inputs.trajectory_B[inputs.sample_of_R[trainable]]
        trajectory_N, order = torch.sort(trajectory_N, stable=True)
        self.entries_N = trainable[order]
        """Where each token is on the response axis [R]."""
        _, self.lengths_S = torch.unique_consecutive(trajectory_N, return_counts=True)
        self.last_S = self.lengths_S.cumsum(0) - 1
        """Where each trajectory's last token is in [N]."""
        self.sample_S = inputs.sample_of_R[self.entries_N[self.last_S]]
        """The sample that the last token belongs to."""

    def sums(self, values_N: Tensor) -> Tensor:
        """The sum over each trajectory, shape [S]."""
        rows_N = torch.repeat_interleave(torch.arange(len(self.lengths_S), device=values_N.device), self.lengths_S)
        return values_N.new_zeros(len(self.lengths_S)).index_add_(0, rows_N, values_N)

    def on_response_axis(self, values_N: Tensor, inputs: AdvantageInputs) -> Tensor:
        """Values of trainable tokens put back in place, 0 elsewhere; shape [R], the rewards' data type."""
        values_R = torch.zeros(len(inputs.mask_R), dtype=inputs.rewards_B.dtype, device=values_N.device)
        values_R[self.entries_N] = values_N.to(values_R.dtype)
        return values_R


def on_trainable_tokens(values_B: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Each trainable token's entry of `values_B` [B], 0 elsewhere; shape [R]."""
    values_R = values_B[inputs.sample_of_R]
    return torch.where(inputs.mask_R != 0, values_R, torch.zeros_like(values_R))


def kl_penalty(inputs: AdvantageInputs) -> Tensor:
    """`kl_coef` x `kl_R` at trainable tokens, 0 elsewhere and without a coefficient; float64 [R].

    Raises ValueError when there is a coefficient and no divergence.
    """
    if not inputs.kl_coef:
        return torch.zeros(len(inputs.mask_R), dtype=torch.float64, device=inputs.mask_R.device)
    if inputs.kl_R is None:
        raise ValueError("kl_coef is not 0, so kl_R has to be given")
    return torch.where(inputs.mask_R != 0, inputs.kl_coef * inputs.kl_R.double(), 0.0)
