"""Mean 0 and variance 1 over all trainable tokens of a batch, wherever they are."""

# R response tokens

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from miles.errors import TrainingError

VARIANCE_EPS = 1e-8


def whiten(values_R: Tensor, mask_R: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """(values - mean) / sqrt(unbiased variance + 1e-8) over tokens whose mask is not 0, and 0 elsewhere; shape [R].

    With `group`, `values_R` is this rank's share, mean and variance are those of all ranks, and every rank of the group
    has to call, also one without tokens. Without, nothing is exchanged. Computed in float64; equal values, and a single
    one, give exactly 0. Masked values are not read.

    Raises TrainingError, on all ranks, when no rank has a trainable token.
    """

    def reduced(values: list[Tensor], op: dist.ReduceOp.RedOpType) -> list[Tensor]:
        stacked = torch.stack(values)
        if group is not None:
            dist.all_reduce(stacked, op=op, group=group)
        return list(stacked)

    trainable_R = mask_R != 0
    values_N = values_R[trainable_R].double()
    floor = values_N.new_full((1,), -torch.inf)
    (largest,) = reduced([torch.cat([values_N, floor]).max()], dist.ReduceOp.MAX)
    # Distances from a value of the batch: they are exactly 0 when all values are equal.
    distances_N = values_N - largest
    total, count = reduced([distances_N.sum(), values_N.new_tensor(len(values_N))], dist.ReduceOp.SUM)
    if not count:
        raise TrainingError(
            "no token of the whole batch is trainable, so advantages cannot be normalised"
            "\n    fix: look for what sets loss_mask to 0 or remove_sample on every sample"
        )
    centred_N = distances_N - total / count
    (squares,) = reduced([centred_N.square().sum()], dist.ReduceOp.SUM)
    whitened_R = torch.zeros_like(values_R)
    whitened_R[trainable_R] = (centred_N * torch.rsqrt(squares / (count - 1).clamp(min=1) + VARIANCE_EPS)).to(
        values_R.dtype
    )
    return whitened_R
