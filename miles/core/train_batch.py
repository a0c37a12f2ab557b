"""`TrainBatch`: what a rollout hands to the trainer. Columns know their axis, so packing and sharding read it alone."""

# B samples, T tokens of a sample (prompt + response), R its response tokens, L layers, K entries

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Axis = Literal["token", "response", "transition", "sample", "opaque"]
AXES: tuple[Axis, ...] = ("token", "response", "transition", "sample", "opaque")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """One named value per sample, ragged along its axis.

    `values` holds all rows end to end: shape [sum of row lengths, *trailing_shape] for `token` (T rows a sample),
    `response` (R), `transition` (T - 1) and `sample` (1); a list of B objects for `opaque`. Row b is
    `values[offsets[b]:offsets[b + 1]]`.
    """

    values: Array | list[Any]
    offsets: NDArray[np.int64]
    trailing_shape: tuple[int, ...]
    dtype: str
    axis: Axis

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ValueError(f"no axis {self.axis!r}; the axes are {', '.join(AXES)}")
        if len(self.values) != int(self.offsets[-1]):
            raise ValueError(f"{len(self.values)} values but offsets end at {int(self.offsets[-1])}")
        if isinstance(self.values, np.ndarray):
            found = (str(self.values.dtype), tuple(self.values.shape[1:]))
            if found != (self.dtype, self.trailing_shape):
                raise ValueError(f"values are {found}, declared as {(self.dtype, self.trailing_shape)}")

    @classmethod
    def from_rows(
        cls, rows: Sequence[Any], axis: Axis, dtype: str = "float32", trailing_shape: tuple[int, ...] = ()
    ) -> Column:
        """Join rows, one per sample; for `sample` each row is one value of `trailing_shape`."""
        if axis == "opaque":
            return cls(
                values=list(rows), offsets=_offsets([1] * len(rows)), trailing_shape=(), dtype="object", axis=axis
            )
        arrays = [np.asarray(r, dtype=dtype) for r in rows]
        if axis == "sample":
            arrays = [a.reshape(1, *trailing_shape) for a in arrays]
        arrays = [a if a.size else a.reshape(0, *trailing_shape) for a in arrays]
        for number, array in enumerate(arrays):
            if tuple(array.shape[1:]) != trailing_shape:
                raise ValueError(
                    f"row {number} has shape {array.shape}; expected [*, {', '.join(map(str, trailing_shape))}]"
                )
        empty = np.zeros((0, *trailing_shape), dtype=dtype)
        values = np.concatenate([empty, *arrays])
        return cls(
            values=values,
            offsets=_offsets([len(a) for a in arrays]),
            trailing_shape=trailing_shape,
            dtype=dtype,
            axis=axis,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, b: int) -> Any:
        """Row of sample b: an array [length, *trailing_shape], or the object of an opaque column."""
        if self.axis == "opaque":
            return self.values[b]
        return self.values[int(self.offsets[b]) : int(self.offsets[b + 1])]

    def rows(self) -> Iterator[Any]:
        """All rows in order."""
        return (self.row(b) for b in range(len(self)))

    def lengths(self) -> NDArray[np.int64]:
        """Row lengths, shape [B]."""
        return np.diff(self.offsets)

    def select(self, indices: Sequence[int]) -> Column:
        """The column of the samples at `indices`, in that order."""
        picked = [self.row(b) for b in indices]
        if self.axis == "opaque":
            return Column.from_rows(picked, "opaque")
        if self.axis == "sample":
            picked = [p[0] for p in picked]
        return Column.from_rows(picked, self.axis, self.dtype, self.trailing_shape)


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """The samples of one training step as columns.

    Required columns: `tokens` (token, int64) and `loss_mask` (response, float32). `sample_index`, `trajectory`
    (sample, int64) name each sample. `extra` holds columns of hooks.
    """

    columns: Mapping[str, Column]
    extra: Mapping[str, Column] = field(default_factory=dict[str, Column])

    def __post_init__(self) -> None:
        missing = [name for name in ("tokens", "loss_mask") if name not in self.columns]
        if missing:
            raise ValueError(f"a train batch needs the columns tokens and loss_mask; missing: {', '.join(missing)}")
        if clash := sorted(set(self.columns) & set(self.extra)):
            raise ValueError(f"extra columns may not replace columns of the batch: {', '.join(clash)}")
        expected = {
            "token": self.total_lengths,
            "response": self.response_lengths,
            "transition": np.maximum(self.total_lengths - 1, 0),
            "sample": np.ones(len(self), dtype=np.int64),
            "opaque": np.ones(len(self), dtype=np.int64),
        }
        for name, column in self.all_columns():
            if len(column) != len(self):
                raise ValueError(f"column {name} has {len(column)} rows but there are {len(self)} samples")
            wrong = np.flatnonzero(column.lengths() != expected[column.axis])
            if len(wrong):
                b = int(wrong[0])
                raise ValueError(
                    f"column {name} ({column.axis} axis): sample {b} has {int(column.lengths()[b])} entries, "
                    f"expected {int(expected[column.axis][b])}"
                )

    def __len__(self) -> int:
        return len(self.columns["tokens"])

    @property
    def total_lengths(self) -> NDArray[np.int64]:
        """T of each sample, shape [B]."""
        return self.columns["tokens"].lengths()

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """R of each sample, shape [B]."""
        return self.columns["loss_mask"].lengths()

    def __getitem__(self, name: str) -> Column:
        found = self.columns.get(name, self.extra.get(name))
        if found is None:
            known = ", ".join(sorted([*self.columns, *self.extra]))
            raise KeyError(f"the batch has no column {name!r}; it has {known}")
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.extra

    def all_columns(self) -> Iterator[tuple[str, Column]]:
        """Names and columns, extra ones last."""
        yield from self.columns.items()
        yield from self.extra.items()

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The batch of the samples at `indices`, in that order."""
        return self.map(lambda column: column.select(indices))

    def map(self, fn: Callable[[Column], Column]) -> TrainBatch:
        """A batch with `fn` applied to each column."""
        return TrainBatch(
            columns={n: fn(c) for n, c in self.columns.items()}, extra={n: fn(c) for n, c in self.extra.items()}
        )

    def with_columns(self, columns: Mapping[str, Column]) -> TrainBatch:
        """A batch with further columns, or other ones of the same name."""
        return TrainBatch(columns={**self.columns, **columns}, extra=self.extra)


def concat(batches: Iterable[TrainBatch]) -> TrainBatch:
    """One batch of all samples; every batch must have the same columns."""
    parts = list(batches)
    if not parts:
        raise ValueError("there is no batch to join")

    def kinds(part: TrainBatch) -> dict[str, tuple[Axis, str, tuple[int, ...]]]:
        return {n: (c.axis, c.dtype, c.trailing_shape) for n, c in part.all_columns()}

    for part in parts[1:]:
        if differing := sorted(n for n, _ in kinds(parts[0]).items() ^ kinds(part).items()):
            raise ValueError(f"the batches have different columns: {', '.join(dict.fromkeys(differing))}")

    def join(name: str) -> Column:
        first = parts[0][name]
        rows = [row for part in parts for row in part[name].rows()]
        if first.axis == "sample":
            rows = [cast(Array, r)[0] for r in rows]
        return Column.from_rows(rows, first.axis, first.dtype, first.trailing_shape)

    return TrainBatch(columns={n: join(n) for n in parts[0].columns}, extra={n: join(n) for n in parts[0].extra})
