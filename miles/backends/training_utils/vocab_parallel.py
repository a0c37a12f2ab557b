"""A vocabulary whose rows of the output head are spread over ranks, for `log_probs`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """One rank's ids: `start` and as many on as its head has rows. Shards of the group's ranks follow each other in rank order.

    With it `linear_log_softmax` gives every rank the whole's results, hidden-state gradients, and its rows of the head's
    gradient (Shoeybi et al. 2019, Megatron-LM, section 3), when every rank computes the same loss of the results.
    Collective: all ranks of `group` run the same forward and backward passes.
    """

    start: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, weight_VD: Tensor, group: dist.ProcessGroup) -> VocabShard:
        """Of this rank's rows of the head; learns from the other ranks how many rows come before. Collective."""
        sizes = [torch.zeros(1, dtype=torch.int64, device=weight_VD.device) for _ in range(group.size())]
        dist.all_gather(sizes, torch.tensor([len(weight_VD)], device=weight_VD.device), group=group)
        return cls(int(sum(int(size) for size in sizes[: group.rank()])), group)

    def sum_(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def max_(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def join(self, values_CK: Tensor) -> Tensor:
        parts = [torch.empty_like(values_CK) for _ in range(self.group.size())]
        dist.all_gather(parts, values_CK.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
