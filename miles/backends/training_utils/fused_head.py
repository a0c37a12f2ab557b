"""Log-probabilities and entropies of the output head on a GPU: products in 16 bits, everything else in one kernel a row."""

# N predicted tokens, C of them in a chunk, D hidden size, V vocabulary

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 29
"""Logits that exist at a time beside those that are kept: 1 GiB in 16 bits."""

TILE = 256
"""Rows that a matrix product computes together; others would be computed for nothing."""


@cache
def has_triton() -> bool:
    """Whether the kernels can be compiled; torch for GPUs brings Triton along."""
    return find_spec("triton") is not None


def linear_log_prob_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, *, kept_bytes: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy, fp32 [N] in nats, under softmax(hidden @ weight.T / temperature).

    Up to `kept_bytes` of logits are kept for the backward pass; those of other chunks it computes again. Either way the
    gradient is written over them. The gradient of the weight is summed over chunks in fp32.
    """
    found = _FusedHead.apply(hidden_ND, weight_VD, targets_N, float(temperature), kept_bytes)
    return cast("tuple[Tensor, Tensor]", found)


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    if size > TILE:
        size -= size % TILE
    return [slice(start, min(rows, start + size)) for start in range(0, rows, size)]


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, kept_bytes: int
    ) -> tuple[Tensor, Tensor]:
        from miles.backends.training_utils.fused_softmax import log_softmax_rows

        ctx.set_materialize_grads(False)
        log_p_N, entropy_N, log_z_N = (hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32) for _ in range(3))
        ctx.kept = {}
        room = kept_bytes if any(ctx.needs_input_grad) else 0
        for rows in _chunks(len(hidden_ND), len(weight_VD)):
            logits_CV = hidden_ND[rows] @ weight_VD.T
            log_p_N[rows], entropy_N[rows], log_z_N[rows] = log_softmax_rows(
                logits_CV, targets_N[rows], 1.0 / temperature
            )
            if logits_CV.nbytes <= room:
                room -= logits_CV.nbytes
                ctx.kept[rows.start] = logits_CV
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, log_z_N, entropy_N)
        ctx.temperature = temperature
        return log_p_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from miles.backends.training_utils.fused_softmax import logit_gradient_rows

        hidden_ND, weight_VD, targets_N, log_z_N, entropy_N = ctx.saved_tensors
        zeros_N = torch.zeros_like(log_z_N)
        own_N, slope_N = (zeros_N if grad is None else grad.contiguous() for grad in grads)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD: Tensor | None = None
        # d log p / dz = onehot - p and d H / dz = -p (log p + H), with z the scaled logits.
        flat_N = -own_N - slope_N * entropy_N
        for rows in _chunks(len(hidden_ND), len(weight_VD)):
            logits_CV = ctx.kept.pop(rows.start, None)
            if logits_CV is None:
                logits_CV = hidden_ND[rows] @ weight_VD.T
            grad_CV = logit_gradient_rows(
                logits_CV,
                targets_N[rows],
                log_z_N[rows],
                flat_N[rows],
                -slope_N[rows],
                own_N[rows],
                1.0 / ctx.temperature,
            )
            del logits_CV
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if wants_weight:
                grad_weight_VD = _sum_of_products(grad_weight_VD, grad_CV, hidden_ND[rows])
        if wants_weight and grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD)
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None, None


def _sum_of_products(grad_weight_VD: Tensor | None, grad_CV: Tensor, hidden_CD: Tensor) -> Tensor:
    """grad.T @ hidden in fp32, the first or added to a sum; where possible in one product that reads 16 bits."""
    if grad_weight_VD is None:
        if grad_CV.dtype == torch.float32:
            return grad_CV.T @ hidden_CD
        return torch.mm(grad_CV.T, hidden_CD, out_dtype=torch.float32)
    if grad_CV.dtype == grad_weight_VD.dtype:
        grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
    elif _adds_up_wider(grad_CV.dtype, grad_CV.device):
        torch.ops.aten.addmm.dtype_out(grad_weight_VD, grad_CV.T, hidden_CD, torch.float32, out=grad_weight_VD)
    else:
        grad_weight_VD += torch.mm(grad_CV.T, hidden_CD, out_dtype=torch.float32)
    return grad_weight_VD


@cache
def _adds_up_wider(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch adds a product of `dtype` to fp32; some versions want the sum in the type of the factors."""
    factor = torch.zeros((16, 16), dtype=dtype, device=device)
    total = torch.zeros((16, 16), device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor, factor, torch.float32, out=total)
    except RuntimeError:
        return False
    return True


__all__ = ["has_triton", "linear_log_prob_entropy"]
