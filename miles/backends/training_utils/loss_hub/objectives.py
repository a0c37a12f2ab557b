"""Policy-gradient terms per token: how a ratio is formed, and how it is kept near 1. One function each, one table."""

# N predicted tokens, A the same and tokens of their trajectories in other micro-batches

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Settings of all objectives; each reads its own."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    divergence: Literal["tv", "kl"] = "tv"
    divergence_bound: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """What objectives read, all [N], finite everywhere; masked tokens hold zeros."""

    logprobs_N: Tensor
    """Carries the gradient."""
    old_logprobs_N: Tensor
    log_ratio_N: Tensor
    """logprobs - old_logprobs, bounded at +-20; carries the gradient."""
    advantages_N: Tensor
    sequences: Callable[[], Sequences]
    """Means over trajectories; most objectives do not ask for them."""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Per-token terms, all [N]; `clipped_N` is 1 where a bound decides the term."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


def clipped_terms(ratio_N: Tensor, advantages_N: Tensor, bounds: Bounds) -> Terms:
    """max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017, PPO).

    A larger upper clip is DAPO's clip-higher (Yu et al. 2025). With `dual_clip` c > 1, tokens of negative advantage have
    the loss min(c |A|, loss) (Ye et al. 2020).
    """
    plain_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - bounds.clip_low, 1 + bounds.clip_high) * advantages_N
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if bounds.dual_clip is not None:
        ceiling_N = -bounds.dual_clip * advantages_N
        above_N = (advantages_N < 0) & (ceiling_N < loss_N)
        loss_N = torch.where(above_N, ceiling_N, loss_N)
        clipped_N = clipped_N | above_N
    return _terms(loss_N, ratio_N, clipped_N)


def ppo(tokens: PolicyTokens, bounds: Bounds) -> Terms:
    """The clipped objective on token ratios (Schulman et al. 2017; Shao et al. 2024 for GRPO)."""
    return clipped_terms(tokens.log_ratio_N.exp(), tokens.advantages_N, bounds)


def gspo(tokens: PolicyTokens, bounds: Bounds) -> Terms:
    """The clipped objective on sequence ratios (Zheng et al. 2025, GSPO).

    s = exp(mean over the trajectory's tokens of log-ratio), the same for all its tokens. A token's ratio has the value s
    and the gradient s x grad logprobs (the paper's GSPO-token form): summed over the trajectory this is the gradient of
    s itself, and it needs only the trajectory's own tokens, wherever they are.
    """
    sequences = tokens.sequences()
    log_s_N = sequences.mean_N(sequences.log_ratio_A)
    ratio_N = (log_s_N + tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return clipped_terms(ratio_N, tokens.advantages_N, bounds)


def gmpo(tokens: PolicyTokens, bounds: Bounds) -> Terms:
    """-A x the geometric mean of clipped token ratios (Zhao et al. 2025, GMPO).

    A token's log-ratio is bounded above by clip_high where A >= 0 and below by -clip_low where A < 0: the ratio's bounds
    are exp(clip_high) and exp(-clip_low). The mean runs over the trajectory; bounded tokens have no gradient. As for
    `gspo`, a token has the trajectory's value and its own part of the gradient.
    """
    sequences = tokens.sequences()
    bounded_A = _gmpo_bound(sequences.log_ratio_A, sequences.advantages_A, bounds)
    bounded_N = _gmpo_bound(tokens.log_ratio_N, tokens.advantages_N, bounds)
    ratio_N = (sequences.mean_N(bounded_A) + bounded_N - bounded_N.detach()).exp()
    return _terms(-ratio_N * tokens.advantages_N, ratio_N, bounded_N != tokens.log_ratio_N)


def _gmpo_bound(log_ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    return torch.where(advantages < 0, log_ratio.clamp(min=-bounds.clip_low), log_ratio.clamp(max=bounds.clip_high))


def cispo(tokens: PolicyTokens, bounds: Bounds) -> Terms:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) x A x logprobs (MiniMax 2025, MiniMax-M1).

    Every token keeps its gradient; the clip bounds its weight. A `clip_low` of 1 or more switches the lower bound off.
    """
    ratio_N = tokens.log_ratio_N.detach().exp()
    bounded_N = ratio_N.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
    return _terms(-bounded_N * tokens.advantages_N * tokens.logprobs_N, ratio_N, bounded_N != ratio_N)


def sapo(tokens: PolicyTokens, bounds: Bounds) -> Terms:
    """-A x (4 / tau) x sigmoid(tau (ratio - 1)), tau_pos where A > 0 and tau_neg elsewhere (Gao et al. 2025, SAPO).

    The gradient is 4 p (1 - p) x ratio x A x grad logprobs with p the sigmoid: that of the plain ratio at 1, fading away
    from it. No token is clipped.
    """
    ratio_N = tokens.log_ratio_N.exp()
    tau_N = torch.full_like(ratio_N, bounds.tau_neg).masked_fill(tokens.advantages_N > 0, bounds.tau_pos)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return _terms(-gate_N * tokens.advantages_N, ratio_N, torch.zeros_like(ratio_N))


def dppo(tokens: PolicyTokens, bounds: Bounds) -> Terms:
    """-ratio x A, without gradient where an update away from the old policy would leave a divergence's trust region.

    Masked are tokens with A > 0 and ratio > 1, or A < 0 and ratio < 1, whose divergence exceeds `divergence_bound`
    (Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", DPPO). The divergence is that of "this
    token or any other": `tv` is |p - q|, `kl` is q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with p the current and q
    the old probability of the token. The value of a masked token is 0.
    """
    ratio_N = tokens.log_ratio_N.exp()
    with torch.no_grad():
        away_N = tokens.log_ratio_N * tokens.advantages_N > 0
        divergence_N = binary_divergence(tokens.logprobs_N, tokens.old_logprobs_N, bounds.divergence)
        outside_N = away_N & (divergence_N > bounds.divergence_bound)
    loss_N = torch.where(outside_N, 0.0, -ratio_N * tokens.advantages_N)
    return _terms(loss_N, ratio_N, outside_N)


def binary_divergence(logprobs_N: Tensor, old_logprobs_N: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Divergence of old from current policy over the two events "this token" and "any other"; [N], in nats for `kl`."""
    p_N, q_N = logprobs_N.exp(), old_logprobs_N.exp()
    if kind == "tv":
        return (p_N - q_N).abs()
    tiny = torch.finfo(p_N.dtype).tiny
    other_p_N, other_q_N = (-torch.expm1(x_N.clamp(max=0)) for x_N in (logprobs_N, old_logprobs_N))
    rest_N = other_q_N * (other_q_N.clamp_min(tiny).log() - other_p_N.clamp_min(tiny).log())
    return q_N * (old_logprobs_N - logprobs_N) + rest_N


def off_policy_sequences(tokens: PolicyTokens, delta: float) -> Tensor:
    """1 for tokens with A < 0 in a trajectory whose mean of old - current log-probs exceeds `delta`, else 0; [N].

    Their policy-gradient terms are left out (DeepSeek-AI 2025, DeepSeek-V3.2, off-policy sequence masking).
    """
    sequences = tokens.sequences()
    drift_N = -sequences.mean_N(sequences.log_ratio_A)
    return ((tokens.advantages_N < 0) & (drift_N > delta)).to(tokens.logprobs_N.dtype)


def _terms(loss_N: Tensor, ratio_N: Tensor, clipped_N: Tensor) -> Terms:
    return Terms(loss_N, ratio_N.detach(), clipped_N.to(loss_N.dtype))


Objective = Callable[[PolicyTokens, Bounds], Terms]
OBJECTIVES: dict[str, Objective] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
}
"""Every value of `--policy-objective`."""
OF_SEQUENCES = frozenset({"gspo", "gmpo"})
"""Objectives whose terms depend on the whole trajectory."""
