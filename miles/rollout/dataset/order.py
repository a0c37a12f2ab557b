"""The order in which rows are drawn, and the position in it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from miles.rollout.dataset.tables import Part

Place = tuple[Part, int]
"""A part, and a row of it."""


class Stream:
    """The rows of several parts one after another, epoch after epoch.

    Epoch e of a shuffled stream has the order of `random.Random(seed + e)`; 4 bytes a row.
    """

    def __init__(self, parts: Sequence[Part], seed: int | None) -> None:
        self._parts, self._seed = parts, seed
        self.epoch = 0
        self.offset = 0
        """Rows of this epoch already drawn; less than the epoch has."""
        self._order: tuple[int, array[int]] | None = None

    def __len__(self) -> int:
        """Rows of an epoch."""
        return sum(len(part) for part in self._parts)

    def draw(self) -> Place:
        """The next row."""
        place = self._place(self._row(self.offset))
        self.offset += 1
        if not self._has(self.offset):
            self.epoch, self.offset = self.epoch + 1, 0
        return place

    def seek(self, epoch: int, offset: int) -> None:
        """Go on from a position."""
        self.epoch, self.offset = epoch, offset

    def _row(self, offset: int) -> int:
        if self._seed is None:
            return offset
        if self._order is None or self._order[0] != self.epoch:
            rows = array("i" if len(self) < 1 << 31 else "q", range(len(self)))
            random.Random(self._seed + self.epoch).shuffle(rows)
            self._order = (self.epoch, rows)
        return self._order[1][offset]

    def _has(self, row: int) -> bool:
        for part in self._parts:
            if part.has(row):
                return True
            row -= len(part)
        return False

    def _place(self, row: int) -> Place:
        for part in self._parts:
            if part.has(row):
                return part, row
            row -= len(part)
        raise IndexError(row)


class Order:
    """Draws from one stream of all parts, or, with weights, from a stream for each part in turn.

    With weights w, after t draws part k has given w_k / sum(w) x t rows, to within a few: the part that lags most is
    next, the first of those that lag alike. Each part runs through epochs of its own, so its rows are drawn equally
    often to within one. An epoch is as many draws as the parts have rows, whatever the weights.
    """

    def __init__(self, parts: Sequence[Part], weights: Sequence[float], seed: int | None) -> None:
        self.weights = list(weights)
        groups = [[part] for part in parts] if weights else [list(parts)]
        self._streams = [Stream(group, seed) for group in groups]

    def __len__(self) -> int:
        """Draws of an epoch: the rows of all parts."""
        return sum(len(stream) for stream in self._streams)

    def position_of(self, state: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Epoch, and draws of it already done, of a `state`."""
        if not self.weights:
            ((epoch, offset),) = state
            return epoch, offset
        drawn = [e * len(stream) + o for stream, (e, o) in zip(self._streams, state, strict=True)]
        return divmod(sum(drawn), len(self))

    def draw(self) -> Place:
        """The next row."""
        if not self.weights:
            return self._streams[0].draw()
        drawn, whole = self._drawn(), sum(self.weights)
        turn = sum(drawn) + 1
        behind = [w * turn - whole * d for w, d in zip(self.weights, drawn, strict=True)]
        return self._streams[behind.index(max(behind))].draw()

    def _drawn(self) -> list[int]:
        """Rows drawn from each stream since the start."""
        return [s.epoch * len(s) + s.offset if s.epoch else s.offset for s in self._streams]

    def state(self) -> list[list[int]]:
        """Position of each stream, JSON-ready."""
        return [[stream.epoch, stream.offset] for stream in self._streams]

    def seek(self, state: Sequence[Sequence[int]]) -> None:
        """Go on from `state`."""
        for stream, (epoch, offset) in zip(self._streams, state, strict=True):
            stream.seek(int(epoch), int(offset))

    @property
    def start(self) -> list[list[int]]:
        """The state before the first draw."""
        return [[0, 0] for _ in self._streams]


def identity(parts: Sequence[Part], order: Order, seed: int | None) -> dict[str, Any]:
    """What a position in `order` refers to, JSON-ready."""
    files: list[Mapping[str, Any]] = [part.identity() for part in parts]
    return {
        "files": [dict(file) for file in files],
        "weights": order.weights,
        "shuffle": seed is not None,
        "seed": seed,
    }
