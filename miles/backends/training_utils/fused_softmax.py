"""Triton kernels over rows of logits: log-probability of a target and entropy in one pass, and their gradient in place.

A row is read once in the forward pass and read and written once in the backward pass, in the logits' own 16 bits; the
sums are fp32. `linear_log_softmax` uses them on a GPU.
"""

# Triton comes with torch for GPUs; where there is none this module is not imported.
# pyright: reportMissingImports=false, reportIndexIssue=false

# C rows of a chunk, V vocabulary

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 8


def log_softmax_rows(logits_CV: Tensor, targets_C: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy H = -sum p log p, and log Z, each fp32 [C], of p = softmax(scale * logits); natural logs."""
    rows, columns = logits_CV.shape
    found = tuple(torch.empty(rows, dtype=torch.float32, device=logits_CV.device) for _ in range(3))
    if rows:
        _forward[(rows,)](
            logits_CV, targets_C, *found, scale, logits_CV.stride(0), columns=columns, BLOCK=_BLOCK, num_warps=_WARPS
        )
    log_p_C, entropy_C, log_z_C = found
    return log_p_C, entropy_C, log_z_C


def logit_gradient_rows(
    logits_CV: Tensor,
    targets_C: Tensor,
    log_z_C: Tensor,
    factor_C: Tensor,
    log_factor_C: Tensor,
    target_C: Tensor,
    scale: float,
) -> Tensor:
    """Write scale * (p * (factor + log_factor * log p) + target at the target's column) over the logits; returns them."""
    rows, columns = logits_CV.shape
    if rows:
        _backward[(rows,)](
            logits_CV,
            targets_C,
            log_z_C,
            factor_C,
            log_factor_C,
            target_C,
            scale,
            logits_CV.stride(0),
            columns=columns,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return logits_CV


@triton.jit
def _forward(logits, targets, log_p, entropy, log_z, scale, stride, columns: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    # Each lane keeps its own maximum, sum of e^(x - max) and of x e^(x - max); lanes are joined after the last block.
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(base + places, mask=places < columns, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(peak, x)
        shrink = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - higher))
        weight = tl.where(x == float("-inf"), 0.0, tl.exp(x - higher))
        mass = mass * shrink + weight
        moment = moment * shrink + tl.where(x == float("-inf"), 0.0, weight * x)
        peak = higher
    top = tl.max(peak, axis=0)
    shrink = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - top))
    total = tl.sum(mass * shrink, axis=0)
    mean = tl.sum(moment * shrink, axis=0) / total
    norm = top + tl.log(total)
    target = tl.load(base + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(log_p + row, target - norm)
    tl.store(entropy + row, norm - mean)
    tl.store(log_z + row, norm)


@triton.jit
def _backward(
    logits, targets, log_z, factor, log_factor, target_grad, scale, stride, columns: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    target = tl.load(targets + row)
    norm = tl.load(log_z + row)
    flat = tl.load(factor + row)
    slope = tl.load(log_factor + row)
    own = tl.load(target_grad + row)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < columns
        x = tl.load(base + places, mask=inside, other=float("-inf")).to(tl.float32) * scale
        log_p = x - norm
        p = tl.exp(log_p)
        grad = tl.where(p > 0, p * (flat + slope * log_p), 0.0)
        grad += tl.where(places == target, own, 0.0)
        tl.store(base + places, (grad * scale).to(logits.dtype.element_ty), mask=inside)
