"""Where sequences are in a pack, and how their attention is best computed: as rows side by side, or by their borders."""

# S sequences and T tokens of a pack

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIMILAR, SHORT = 0.8, 64
"""On a CPU sequences attend side by side when the shortest has this share of the longest's tokens, or the longest is this short."""
CANDIDATES = 16
"""Places at most where a GPU's groups may begin; more would cost more to weigh than they save."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a GPU attends to a sequence of n tokens: `peak` x n / (n + `half`), in TFLOP/s, forward and backward."""

    peak: float
    half: float

    def microseconds(self, length: int) -> float:
        """Of causal attention with 16 heads of 128 over a sequence: 7 operations a pair and channel, 3.5 matrix products."""
        return 7 * 2048 * length * (length + self.half) / (self.peak * 1e6)


ROWS = Speed(637.0, 2333.0)
"""Rows of equal length through cuDNN, from 298 TFLOP/s at 8 x 2048 tokens and 558 at 1 x 16,384 on an H200."""
BORDERS = Speed(326.0, 1626.0)
"""One kernel over a pack of any lengths: 182 and 297 there."""
START_US, MOVE_US = 150.0, 0.015
"""What each group of rows costs to start, and each place to move there and back when rows are padded."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Neighbours in a pack that attend together as `rows` rows of `width` places, padded on the right."""

    start: int
    stop: int
    """Their tokens are `start:stop` of the pack."""
    rows: int
    width: int
    gather: Tensor | None
    """Token of `start:stop` for each place, [rows x width]; at padding any. None when no row is padded."""
    scatter: Tensor | None
    """Place of each token, [stop - start]; None when no row is padded."""

    def to(self, device: torch.device) -> SequenceGroup:
        """The group with its indices on `device`."""
        gather, scatter = (None if x is None else moved(x, device) for x in (self.gather, self.scatter))
        return SequenceGroup(self.start, self.stop, self.rows, self.width, gather, scatter)


@dataclass(slots=True, eq=False)
class SequenceLayout:
    """Where sequences are in a pack, so that attention looks neither across their borders nor ahead.

    Not to be changed, but not frozen either: torch.compile looks into a frozen record, and would compile for each layout.
    """

    cu_seqlens: Tensor
    """Borders of the sequences, int32 [S + 1]."""
    max_length: int
    groups: tuple[SequenceGroup, ...]
    """Every sequence in one group, in order."""
    by_borders: bool = False
    """Whether a kernel that reads the borders is the faster one; on a GPU only."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> SequenceLayout:
        """Of sequences of these lengths, end to end. The longest should come first: neighbours of like length share a group."""
        borders = np.concatenate([[0], np.cumsum(lengths)])
        firsts = _alike(lengths)
        return cls(torch.from_numpy(borders.astype(np.int32)), max(lengths, default=0), _groups(lengths, firsts))

    def to(self, device: torch.device) -> SequenceLayout:
        """The layout on `device`, where a GPU's groups are those that attend fastest."""
        if device.type == "cpu":
            return self
        lengths = np.diff(self.cu_seqlens.numpy()).tolist()
        firsts, rows_us, borders_us = _fastest(lengths)
        groups = tuple(group.to(device) for group in _groups(lengths, firsts))
        return SequenceLayout(moved(self.cu_seqlens, device), self.max_length, groups, borders_us < rows_us)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU's tensor on `device`, without a wait for what runs there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _alike(lengths: Sequence[int]) -> list[int]:
    """Where groups of like length begin."""
    firsts: list[int] = []
    longest = shortest = 0
    for number, length in enumerate(lengths):
        low, high = min(shortest, length), max(longest, length)
        if not firsts or (low < SIMILAR * high and high > SHORT):
            firsts.append(number)
            low = high = length
        shortest, longest = low, high
    return firsts


def _fastest(lengths: Sequence[int]) -> tuple[list[int], float, float]:
    """Where groups should begin on a GPU, the microseconds that they take, and those of one kernel over all borders."""
    if not lengths:
        return [], 0.0, 0.0
    step = max(1.0, max(lengths) / CANDIDATES)
    coarse = [math.ceil(length / step) for length in lengths]
    places = [n for n in range(len(lengths)) if not n or coarse[n] != coarse[n - 1]][: 2 * CANDIDATES]
    ends = [*places[1:], len(lengths)]
    widths = [max(lengths[place:end]) for place, end in zip(places, ends, strict=True)]
    totals = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    # best[n] is what the sequences before place n take, and begins[n] where the last of their groups begins.
    best, begins = [0.0], [0]
    for number, end in enumerate(ends):
        width, found = 0, list[tuple[float, int]]()
        for place in range(number, -1, -1):
            width = max(width, widths[place])
            rows, tokens = end - places[place], totals[end] - totals[places[place]]
            found.append((best[place] + _rows_us(rows, width, tokens), place))
        cost, place = min(found)
        best.append(cost)
        begins.append(place)
    firsts: list[int] = []
    at = len(ends)
    while at:
        at = begins[at]
        firsts.append(places[at])
    return firsts[::-1], best[-1], START_US + sum(map(BORDERS.microseconds, lengths))


def _rows_us(rows: int, width: int, tokens: int) -> float:
    padded = MOVE_US * width * rows if rows * width != tokens else 0.0
    return START_US + rows * ROWS.microseconds(width) + padded


def _groups(lengths: Sequence[int], firsts: list[int]) -> tuple[SequenceGroup, ...]:
    borders = np.concatenate([[0], np.cumsum(lengths)])
    ends = [*firsts[1:], len(lengths)]
    return tuple(
        _group(int(borders[first]), np.asarray(lengths[first:end])) for first, end in zip(firsts, ends, strict=True)
    )


def _group(start: int, lengths: NDArray[np.int64]) -> SequenceGroup:
    rows, width, count = len(lengths), int(lengths.max()), int(lengths.sum())
    if rows * width == count:
        return SequenceGroup(start, start + count, rows, width, None, None)
    real = np.arange(width) < lengths[:, None]
    tokens = np.zeros((rows, width), dtype=np.int64)
    tokens[real] = np.arange(count)
    return SequenceGroup(
        start,
        start + count,
        rows,
        width,
        torch.from_numpy(tokens.reshape(-1)),
        torch.from_numpy(np.flatnonzero(real)),
    )


__all__ = ["SequenceGroup", "SequenceLayout", "moved"]
