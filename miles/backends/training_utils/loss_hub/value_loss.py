"""The critic's loss, and how well it foresees returns."""

# N predicted tokens of the micro-batch, R response tokens of all samples end to end

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.records import LossMetrics, LossOutput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueInputs:
    """Per-token values, all [N]. A token of weight 0 is masked: it changes neither loss, gradient nor metrics."""

    values_N: Tensor
    """Under the current weights, in units of the reward; carries the gradient."""
    old_values_N: Tensor
    """Before the first optimizer step of the rollout."""
    returns_N: Tensor
    """What values are trained towards."""
    weights_N: Tensor
    """Each token's share of the optimizer step's loss; those of the policy loss."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """loss = sum of weights x max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), without a factor 1/2.

    V are values now, V_old those before the first optimizer step, R returns and c is `clip`: within one rollout a value
    is not pulled further than c towards its return. As the reference implementation of Schulman et al. 2017,
    arXiv:1707.06347, does (Engstrom et al. 2020, arXiv:2005.12729, section 3).
    """

    clip: float

    def __call__(self, inputs: ValueInputs) -> LossOutput:
        """The loss of a micro-batch; `value_clipfrac` is the share of tokens whose clipped term is the larger one."""
        weights_N, trainable_N = inputs.weights_N, inputs.weights_N != 0
        values_N = torch.where(trainable_N, inputs.values_N, 0)
        old_N = torch.where(trainable_N, inputs.old_values_N, 0)
        returns_N = torch.where(trainable_N, inputs.returns_N, 0)
        clipped_N = torch.minimum(torch.maximum(values_N, old_N - self.clip), old_N + self.clip)
        plain_N, bounded_N = (values_N - returns_N).square(), (clipped_N - returns_N).square()
        loss = (weights_N * torch.maximum(plain_N, bounded_N)).sum()

        def metrics() -> LossMetrics:
            return LossMetrics(
                weighted={"value_loss": loss.detach()},
                token_sums={"value_clipfrac": (bounded_N > plain_N).sum()},
                num_tokens=int(trainable_N.sum()),
            )

        return LossOutput(loss, metrics)


def explained_variance(values_R: Tensor, returns_R: Tensor, trainable_R: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) over trainable tokens, computed in float64.

    1 is perfect foresight, 0 what a constant gets. None when all returns are equal: there is nothing to explain.
    """
    values_N, returns_N = values_R[trainable_R].double(), returns_R[trainable_R].double()
    if not len(returns_N) or bool((returns_N == returns_N[0]).all()):
        return None
    return float(1 - (returns_N - values_N).var(correction=0) / returns_N.var(correction=0))
