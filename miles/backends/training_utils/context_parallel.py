"""Slices of packed sequences for context-parallel ranks, and the whole from all slices, with gradients."""

# T tokens of the whole pack, L tokens of one rank's slice (padding included, the same on every rank)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles.core.packing import CpLayout, cp_positions


@dataclass(frozen=True, slots=True, eq=False)
class CpSlices:
    """Which tokens of a pack each rank of `size` has."""

    tokens_L: tuple[Tensor, ...]
    """Of each rank: place in the whole pack of each token of its slice; -1 for padding."""
    position_ids_L: tuple[Tensor, ...]
    """Of each rank: place of each token within its own sequence; padding goes on counting."""
    place_T: Tensor
    """Place of each token of the whole pack in all slices end to end."""

    @classmethod
    def of(cls, lengths: Sequence[int], size: int, layout: CpLayout) -> CpSlices:
        """Of sequences of these lengths, end to end; see `CpLayout`."""
        total = int(sum(lengths))
        starts = np.cumsum([0, *lengths])
        place_T = np.zeros(total, dtype=np.int64)
        tokens: list[Tensor] = []
        position_ids: list[Tensor] = []
        before = 0
        for rank in range(size):
            places = [cp_positions(length, size, rank, layout) for length in lengths]
            parts = [np.where(p < n, p + start, -1) for p, n, start in zip(places, lengths, starts, strict=False)]
            mine = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
            real = np.flatnonzero(mine >= 0)
            place_T[mine[real]] = before + real
            before += len(mine)
            tokens.append(torch.from_numpy(mine))
            position_ids.append(torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *places])))
        return cls(tuple(tokens), tuple(position_ids), torch.from_numpy(place_T))

    def slice(self, values_T: Tensor, rank: int) -> Tensor:
        """A rank's part [L, ...] of values on the token axis; padding is 0. Carries gradients to the whole."""
        tokens_L = self.tokens_L[rank].to(values_T.device)
        found = values_T.index_select(0, tokens_L.clamp(min=0)) if len(values_T) else values_T
        padding = (tokens_L < 0).reshape(-1, *(1 for _ in values_T.shape[1:]))
        return found.masked_fill(padding, 0)

    def gather(self, values_L: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The whole [T, ...] from every rank's slice, without padding, the same on all ranks. Collective.

        The gradient of a slice is the sum of all ranks' gradients of its tokens: right when the loss is the sum of what ranks
        make of the whole, so that a term which every rank computes must be divided by their number, or left to one.
        """
        gathered = cast("Tensor", _AllGather.apply(values_L.contiguous(), group))
        return gathered.index_select(0, self.place_T.to(values_L.device))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_L: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.count = group, len(values_L)
        parts = [torch.empty_like(values_L) for _ in range(group.size())]
        dist.all_gather(parts, values_L, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        start = ctx.group.rank() * ctx.count
        return total[start : start + ctx.count], None
