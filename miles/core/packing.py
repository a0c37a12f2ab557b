"""Packing and context-parallel slicing by a column's axis alone: nothing here knows a name."""

# S samples of a pack, N tokens of a pack, T tokens of a sample (prompt + response), R its response tokens

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from miles.core.train_batch import Array, Axis, Column, TrainBatch

Indices = NDArray[np.int64]
CpLayout = Literal["zigzag", "contiguous"]
"""Which tokens of a sequence a context-parallel rank has. `zigzag`: chunks i and 2 x size - 1 - i of 2 x size, so that every rank
does the same work under a causal mask (ring attention). `contiguous`: chunk i of size, for attention that gathers all keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedColumn:
    """A column laid out for one pack.

    `values` is [N, *trailing_shape] for the axes token, response and transition, [S, *trailing_shape] for sample, and
    a list of S objects for opaque. On the token axis the value of response token j of a sample stands at that token's
    own position T - R + j, and transition t (the step from token t to t + 1) at position t; positions without a value
    hold 0. The logits that predict a token stand one position earlier.
    """

    values: Array | list[Any]
    axis: Axis
    dtype: str
    trailing_shape: tuple[int, ...]

    @property
    def on_tokens(self) -> bool:
        """Whether there is one value per token of the pack."""
        return self.axis in ("token", "response", "transition")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Samples end to end, or one context-parallel rank's slice of that.

    Sequence s occupies `cu_seqlens[s]:cu_seqlens[s + 1]` of the token axis. With `cp_size` > 1 each sequence was padded
    to equal chunks, of which this rank has those that `cp_layout` says.
    """

    indices: tuple[int, ...]
    """Sample of the batch that each sequence is, length S."""
    cu_seqlens: Indices
    """Borders of the sequences on this rank's token axis, shape [S + 1]."""
    total_lengths: Indices
    """T of each sequence, before padding and slicing, shape [S]."""
    response_lengths: Indices
    """R of each sequence, shape [S]."""
    columns: Mapping[str, PackedColumn]
    extra: Mapping[str, PackedColumn]
    cp_size: int = 1
    cp_rank: int = 0
    cp_layout: CpLayout = "zigzag"

    @property
    def num_tokens(self) -> int:
        """N: tokens on this rank, padding included."""
        return int(self.cu_seqlens[-1])

    @property
    def position_ids(self) -> Indices:
        """Position of each token within its own sequence, shape [N]; padding goes on counting."""
        parts = [cp_positions(int(t), self.cp_size, self.cp_rank, self.cp_layout) for t in self.total_lengths]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    @property
    def sequence_ids(self) -> Indices:
        """Sequence that each token belongs to, 0 to S - 1, shape [N]."""
        return np.repeat(np.arange(len(self.indices), dtype=np.int64), np.diff(self.cu_seqlens))

    def __getitem__(self, name: str) -> PackedColumn:
        found = self.columns.get(name, self.extra.get(name))
        if found is None:
            known = ", ".join(sorted([*self.columns, *self.extra]))
            raise KeyError(f"the packed batch has no column {name!r}; it has {known}")
        return found

    def map(self, fn: Callable[[PackedColumn], PackedColumn]) -> PackedBatch:
        """The pack with `fn` applied to each column."""
        return replace(
            self,
            columns={n: fn(c) for n, c in self.columns.items()},
            extra={n: fn(c) for n, c in self.extra.items()},
        )


def pack(batch: TrainBatch, indices: Sequence[int]) -> PackedBatch:
    """Put the samples of `batch` at `indices` end to end, in that order; see `PackedColumn` for where values stand."""
    part = batch.select(indices)
    total, response = part.total_lengths, part.response_lengths
    cu_seqlens = np.concatenate([[0], np.cumsum(total)]).astype(np.int64)
    slots = {axis: _slots(axis, cu_seqlens, response) for axis in ("token", "response", "transition")}

    def lay_out(column: Column) -> PackedColumn:
        values = column.values
        if column.axis in slots:
            values = np.zeros((int(cu_seqlens[-1]), *column.trailing_shape), dtype=column.dtype)
            values[slots[column.axis]] = column.values
        return PackedColumn(values=values, axis=column.axis, dtype=column.dtype, trailing_shape=column.trailing_shape)

    return PackedBatch(
        indices=tuple(indices),
        cu_seqlens=cu_seqlens,
        total_lengths=total,
        response_lengths=response,
        columns={n: lay_out(c) for n, c in part.columns.items()},
        extra={n: lay_out(c) for n, c in part.extra.items()},
    )


def unpack(packed: PackedBatch) -> TrainBatch:
    """Inverse of `pack`: the samples in the pack's order. Raises ValueError for one rank's slice."""
    if packed.cp_size != 1:
        raise ValueError(
            f"this is the slice of context-parallel rank {packed.cp_rank}; join the slices with join_slices"
        )
    lengths = {
        "token": packed.total_lengths,
        "response": packed.response_lengths,
        "transition": np.maximum(packed.total_lengths - 1, 0),
    }
    count = len(packed.indices)

    def take(column: PackedColumn) -> Column:
        values, sizes = column.values, np.ones(count, dtype=np.int64)
        if column.on_tokens:
            sizes = lengths[column.axis]
            values = cast("Array", column.values)[_slots(column.axis, packed.cu_seqlens, packed.response_lengths)]
        return Column(
            values=values,
            offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            trailing_shape=column.trailing_shape,
            dtype=column.dtype,
            axis=column.axis,
        )

    return TrainBatch(
        columns={n: take(c) for n, c in packed.columns.items()},
        extra={n: take(c) for n, c in packed.extra.items()},
    )


def cp_slice(packed: PackedBatch, cp_size: int, cp_rank: int, layout: CpLayout = "zigzag") -> PackedBatch:
    """The slice of context-parallel rank `cp_rank` of `cp_size`; with one rank, the pack itself.

    Columns of the axes sample and opaque go to every rank whole.
    """
    if packed.cp_size != 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cannot take slice {cp_rank} of {cp_size} from slice {packed.cp_rank} of {packed.cp_size}")
    if cp_size == 1:
        return packed
    positions = [cp_positions(int(t), cp_size, cp_rank, layout) for t in packed.total_lengths]
    spans = list(zip(packed.cu_seqlens[:-1], packed.total_lengths, positions, strict=True))

    def cut(column: PackedColumn) -> PackedColumn:
        if not column.on_tokens:
            return column
        whole = cast("Array", column.values)
        parts = [np.zeros((len(p), *column.trailing_shape), dtype=column.dtype) for _, _, p in spans]
        for part, (start, total, p) in zip(parts, spans, strict=True):
            real = p < total
            part[real] = whole[start + p[real]]
        empty = np.zeros((0, *column.trailing_shape), dtype=column.dtype)
        return replace(column, values=np.concatenate([empty, *parts]))

    cu_seqlens = np.concatenate([[0], np.cumsum([len(p) for p in positions])]).astype(np.int64)
    return replace(packed.map(cut), cu_seqlens=cu_seqlens, cp_size=cp_size, cp_rank=cp_rank, cp_layout=layout)


def join_slices(slices: Sequence[PackedBatch]) -> PackedBatch:
    """Inverse of `cp_slice`: the whole pack from the slices of all ranks, in rank order; padding is removed."""
    cp_size = slices[0].cp_size
    cp_layout = slices[0].cp_layout
    expected = [(cp_size, rank, cp_layout) for rank in range(cp_size)]
    if [(s.cp_size, s.cp_rank, s.cp_layout) for s in slices] != expected:
        found = ", ".join(f"{s.cp_rank} of {s.cp_size} ({s.cp_layout})" for s in slices)
        raise ValueError(f"join_slices wants every slice of one layout once and in order; it got {found}")
    first = slices[0]
    if cp_size == 1:
        return first
    total = first.total_lengths
    starts = np.concatenate([[0], np.cumsum(total)]).astype(np.int64)
    sources: list[Indices] = []
    targets: list[Indices] = []
    for piece in slices:
        positions, sequence = piece.position_ids, piece.sequence_ids
        real = np.flatnonzero(positions < total[sequence])
        sources.append(real)
        targets.append(starts[sequence[real]] + positions[real])

    def join(name: str) -> PackedColumn:
        column = first[name]
        if not column.on_tokens:
            return column
        values = np.zeros((int(starts[-1]), *column.trailing_shape), dtype=column.dtype)
        for piece, source, target in zip(slices, sources, targets, strict=True):
            values[target] = cast("Array", piece[name].values)[source]
        return replace(column, values=values)

    return replace(
        first,
        cu_seqlens=starts,
        columns={n: join(n) for n in first.columns},
        extra={n: join(n) for n in first.extra},
        cp_size=1,
        cp_rank=0,
    )


def _slots(axis: Axis, cu_seqlens: Indices, response_lengths: Indices) -> Indices:
    """Positions on the token axis of all values of `axis`, sequence after sequence."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    if axis == "response":
        starts = ends - response_lengths
    elif axis == "transition":
        ends = np.maximum(ends - 1, starts)
    parts = [np.arange(a, b, dtype=np.int64) for a, b in zip(starts, ends, strict=True)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def cp_positions(total: int, cp_size: int, cp_rank: int, layout: CpLayout) -> Indices:
    """Positions of a sequence of `total` tokens that a context-parallel rank has; those >= `total` are padding."""
    if cp_size == 1:
        return np.arange(total, dtype=np.int64)
    if layout == "contiguous":
        chunk = -(-total // cp_size)
        return np.arange(cp_rank * chunk, (cp_rank + 1) * chunk, dtype=np.int64)
    chunk = -(-total // (2 * cp_size))
    low, high = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return np.concatenate([np.arange(low, low + chunk), np.arange(high, high + chunk)]).astype(np.int64)
