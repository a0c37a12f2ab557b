"""Metrics as sums and counts, so that means do not depend on how work was split over micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from miles.backends.training_utils.loss_hub.records import LossOutput


class StepMetrics:
    """Addends of one optimizer step. Every rank adds the same names, if only zeros."""

    def __init__(self) -> None:
        self._weighted: dict[str, float] = {}
        self._token_sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._num_tokens = 0

    def add(self, output: LossOutput) -> None:
        """Add a micro-batch."""
        self._num_tokens += output.num_tokens
        for name, value in {"loss": output.loss.detach(), **output.weighted}.items():
            self._weighted[name] = self._weighted.get(name, 0.0) + float(value)
        for name, value in output.token_sums.items():
            self._token_sums[name] = self._token_sums.get(name, 0.0) + float(value)
        for name, values in output.maxima.items():
            largest = float(values.max()) if values.numel() else float("-inf")
            self._maxima[name] = max(self._maxima.get(name, float("-inf")), largest)

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Values of the whole step, equal on all ranks of `group` (None: this process alone).

        Collective. Token means and maxima are left out when no rank has a trainable token.
        """
        sums = torch.tensor(
            [*self._weighted.values(), *self._token_sums.values(), self._num_tokens], dtype=torch.float64
        )
        maxima = torch.tensor(list(self._maxima.values()), dtype=torch.float64)
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        *values, num_tokens = sums.tolist()
        num_weighted = len(self._weighted)
        result = dict(zip(self._weighted, values[:num_weighted], strict=True))
        if num_tokens:
            means = values[num_weighted:]
            result |= {name: value / num_tokens for name, value in zip(self._token_sums, means, strict=True)}
            result |= dict(zip(self._maxima, maxima.tolist(), strict=True))
        result["trainable_tokens"] = num_tokens
        return result


def mean_over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the steps that have it; maxima (`*_max`) keep the largest, token counts add up."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name == "trainable_tokens":
            result[name] = sum(values)
        else:
            result[name] = sum(values) / len(values)
    return result
