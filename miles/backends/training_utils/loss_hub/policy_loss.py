"""Clipped policy gradient with dual clip, KL to a reference model, and entropy bonus."""

# N predicted tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.records import LossInputs, LossOutput

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
LOG_RATIO_BOUND = 20.0
LOW_VAR_KL_BOUND = 10.0


@dataclass(frozen=True, slots=True)
class ClippedObjective:
    """Per-token policy-gradient terms, all [N]; `clipped_N` is 1 where a clip decides the term."""

    loss_N: Tensor
    log_ratio_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


def clipped_objective(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedObjective:
    """PPO's pessimistic clipped objective as a loss per token.

    ratio = exp(logprobs - old_logprobs); loss = max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A) (Schulman et
    al. 2017; a larger upper clip is DAPO's clip-higher, Yu et al. 2025). With `dual_clip` c > 1, tokens of negative
    advantage have loss min(c |A|, loss) (Ye et al. 2020). Log-ratios are bounded at +-20.
    """
    log_ratio_N = (logprobs_N - old_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = log_ratio_N.exp()
    plain_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss_N = torch.maximum(plain_N, clipped_N)
    is_clipped_N = clipped_N > plain_N
    if dual_clip is not None:
        bound_N = -dual_clip * advantages_N
        bounded_N = (advantages_N < 0) & (bound_N < loss_N)
        loss_N = torch.where(bounded_N, bound_N, loss_N)
        is_clipped_N = is_clipped_N | bounded_N
    return ClippedObjective(loss_N, log_ratio_N, ratio_N, is_clipped_N.to(loss_N.dtype))


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: KlKind) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating KL divergence").

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d; `low_var_kl` is k3 with d bounded at
    +-20 and the value at +-10. k1 and k3 are unbiased as values. As a loss, k2 has the gradient of this KL on tokens of
    the current policy, k1's gradient is 0 in expectation and k3's is that of KL(reference || policy).
    """
    d_N = logprobs_N - ref_logprobs_N
    if kind == "k1":
        return d_N
    if kind == "k2":
        return d_N.square() / 2
    if kind == "low_var_kl":
        d_N = d_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return (torch.expm1(-d_N) + d_N).clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)
    return torch.expm1(-d_N) + d_N


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """loss = sum of weights x (clipped objective - entropy_coef x entropy + kl_coef x KL). Reads masked tokens nowhere."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KlKind = "k1"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of a micro-batch; needs `old_logprobs_N` and `advantages_N`, and `ref_logprobs_N` for the KL."""
        if inputs.old_logprobs_N is None or inputs.advantages_N is None:
            raise ValueError("the policy loss needs old log-probs and advantages")
        weights_N, trainable_N = inputs.weights_N, inputs.weights_N != 0

        def read(values_N: Tensor) -> Tensor:
            return torch.where(trainable_N, values_N, torch.zeros_like(values_N))

        logprobs_N = read(inputs.logprobs_N)
        terms = clipped_objective(
            logprobs_N,
            read(inputs.old_logprobs_N),
            read(inputs.advantages_N),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        pg = (weights_N * terms.loss_N).sum()
        entropy = (weights_N * read(inputs.entropy_N)).sum()
        loss = pg
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        weighted = {"pg_loss": pg.detach(), "entropy": entropy.detach()}
        if inputs.ref_logprobs_N is not None:
            kl = (weights_N * kl_estimate(logprobs_N, read(inputs.ref_logprobs_N), self.kl_kind)).sum()
            weighted["kl_loss"] = kl.detach()
            if self.kl_coef:
                loss = loss + self.kl_coef * kl
        return LossOutput(
            loss=loss,
            weighted=weighted,
            token_sums={
                "clipfrac": read(terms.clipped_N).sum().detach(),
                "ppo_kl": -terms.log_ratio_N.sum().detach(),
            },
            maxima={"ratio_max": terms.ratio_N[trainable_N].detach()},
            num_tokens=int(trainable_N.sum()),
        )
