"""Metrics as sums and counts, so that means do not depend on how work was split over micro-batches and ranks."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist

from miles.backends.training_utils.loss_hub.records import LossOutput


class StepMetrics:
    """Addends of one optimizer step."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        """What is reported as it adds up."""
        self._token_sums: defaultdict[str, float] = defaultdict(float)
        self._shares: defaultdict[str, float] = defaultdict(float)
        self._share_counts: defaultdict[str, float] = defaultdict(float)
        self._maxima: defaultdict[str, float] = defaultdict(lambda: float("-inf"))
        self._num_tokens = 0

    def add(self, output: LossOutput) -> None:
        """Add a micro-batch."""
        found = output.metrics()
        self._num_tokens += found.num_tokens
        for name, value in {"loss": output.loss.detach(), **found.weighted, **found.counts}.items():
            self._sums[name] += float(value)
        for name, value in found.token_sums.items():
            self._token_sums[name] += float(value)
        for name, (value, count) in found.shares.items():
            self._shares[name] += float(value)
            self._share_counts[name] += float(count)
        for name, values in found.maxima.items():
            self._maxima[name] = max(self._maxima[name], float(values.max()) if values.numel() else float("-inf"))

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Values of the whole step, equal on all ranks of `group` (None: this process alone).

        Collective. Ranks need not have the same names. Means and maxima are left out when no rank has a trainable token.
        """
        tables = (self._sums, self._token_sums, self._shares, self._share_counts, self._maxima)
        shared = group is not None and group.size() > 1
        if shared:
            self._share_names(tables, group)
        names = [sorted(table) for table in tables]
        added = [table[name] for table, keys in zip(tables[:4], names[:4], strict=True) for name in keys]
        sums = torch.tensor([*added, float(self._num_tokens)], dtype=torch.float64)
        maxima = torch.tensor([self._maxima[name] for name in names[4]], dtype=torch.float64)
        if shared:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        *values, num_tokens = sums.tolist()
        parts = iter(values)
        totals, token_sums, shares, counts = ({name: next(parts) for name in keys} for keys in names[:4])
        result = totals
        if num_tokens:
            result |= {name: value / num_tokens for name, value in token_sums.items()}
            result |= {name: value / counts[name] for name, value in shares.items() if counts[name]}
            result |= dict(zip(names[4], maxima.tolist(), strict=True))
        result["trainable_tokens"] = num_tokens
        return result

    def _share_names(self, tables: tuple[defaultdict[str, float], ...], group: dist.ProcessGroup | None) -> None:
        """Give every rank an entry for each name that another rank has."""
        gathered: list[list[list[str]]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, [list(table) for table in tables], group=group)
        for rank in gathered:
            for table, keys in zip(tables, rank, strict=True):
                for name in keys:
                    table[name] = table[name]


def mean_over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the steps that have it; maxima (`*_max`) keep the largest, counts (`*_tokens`) add up."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name.endswith("_tokens"):
            result[name] = sum(values)
        else:
            result[name] = sum(values) / len(values)
    return result
