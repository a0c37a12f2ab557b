"""Log-probabilities and entropies of tokens from hidden states, without ever holding all logits in fp32."""

# N predicted tokens, D hidden size, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Logits that exist at a time: 16 MiB in fp32."""


def token_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target, and entropy in nats, under softmax(hidden @ weight.T / temperature).

    `hidden_ND[n]` is the state that predicts `targets_N[n]`: the one a position earlier. The softmax runs in fp32 over
    chunks of `chunk_elements` logits, which the backward pass computes again. Returns two tensors [N]; both carry
    gradients to `hidden_ND` and `weight_VD`.
    """
    chunk = max(1, chunk_elements // max(1, weight_VD.shape[0]))
    logprobs_N, entropy_N = _TokenLogProbs.apply(hidden_ND, weight_VD, targets_N, float(temperature), chunk)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs_N, entropy_N


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.T
    if logits_CV.dtype != torch.float64:
        logits_CV = logits_CV.float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    return torch.log_softmax(logits_CV, dim=-1)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        dtype = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        logprobs_N = torch.empty(len(hidden_ND), dtype=dtype, device=hidden_ND.device)
        entropy_N = torch.empty_like(logprobs_N)
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            log_p_CV = _log_softmax(hidden_ND[part], weight_VD, temperature)
            logprobs_N[part] = log_p_CV.gather(1, targets_N[part, None]).squeeze(1)
            entropy_N[part] = -(log_p_CV.exp() * log_p_CV).sum(dim=1)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        accumulate = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        grad_weight_VD = torch.zeros(weight_VD.shape, dtype=accumulate, device=weight_VD.device)
        for start in range(0, len(hidden_ND), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p_CV = _log_softmax(hidden_ND[part], weight_VD, ctx.temperature)
            p_CV = log_p_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_logprobs_N is not None:
                grad_C1 = grad_logprobs_N[part, None]
                grad_CV = (p_CV * -grad_C1).scatter_add_(1, targets_N[part, None], grad_C1)
            if grad_entropy_N is not None:
                entropy_C1 = -(p_CV * log_p_CV).sum(dim=1, keepdim=True)
                grad_CV = grad_CV - grad_entropy_N[part, None] * p_CV * (log_p_CV + entropy_C1)
            grad_CV = (grad_CV / ctx.temperature).to(hidden_ND.dtype)
            grad_hidden_ND[part] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.T @ hidden_ND[part]
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None
