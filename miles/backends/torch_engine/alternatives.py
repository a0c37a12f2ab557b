"""Log-probabilities of other tokens than the one that came, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Entries = list[list[Any]]
"""Of one position: [log-probability, token id, None] per token, as the native API writes them."""


@dataclass(slots=True)
class Alternatives:
    """The most probable tokens, and the tokens that were asked for by id, of consecutive positions."""

    top: list[Entries] = field(default_factory=list)
    by_id: list[Entries] = field(default_factory=list)

    def add(self, logprobs_TV: torch.Tensor, count: int, token_ids: Sequence[int]) -> None:
        """Append T positions: their `count` most probable tokens, best first, and the `token_ids` in their order."""
        if count:
            values_TN, ids_TN = logprobs_TV.topk(count, dim=1)
            self.top += [_entries(*row) for row in zip(values_TN.tolist(), ids_TN.tolist(), strict=True)]
        if token_ids:
            ids = list(token_ids)
            self.by_id += [_entries(row, ids) for row in logprobs_TV[:, ids].tolist()]


def _entries(values: list[float], ids: list[int]) -> Entries:
    return [[value, token, None] for value, token in zip(values, ids, strict=True)]
