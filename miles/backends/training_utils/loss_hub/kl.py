"""Estimates of the divergence from a reference model, token by token."""

# N predicted tokens

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.sequences import LOG_RATIO_BOUND

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
LOW_VAR_KL_BOUND = 10.0


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


def unbiased_kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, old_logprobs_N: Tensor, kind: KlKind) -> Tensor:
    """`kl_estimate` times exp(logprobs - old_logprobs), both with gradient (DeepSeek-AI 2025, DeepSeek-V3.2).

    On tokens of the old policy its value and its gradient are, in expectation, those of KL(policy || reference) under
    the current policy. The log-ratio is bounded at +-20.
    """
    log_ratio_N = (logprobs_N - old_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio_N.exp() * kl_estimate(logprobs_N, ref_logprobs_N, kind)
