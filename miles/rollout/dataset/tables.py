"""A data file as numbered rows, each read when it is asked for: JSON Lines or Parquet."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from itertools import accumulate
from typing import Any, Protocol

from miles.errors import DataError
from miles.rollout.dataset.fingerprint import fingerprint
from miles.rollout.dataset.line_index import LineIndex
from miles.utils.jsonl import parse_row, split_slice

ARROW_BYTES = 1 << 30
"""Decoded row groups of a Parquet file that are kept in memory; always at least one."""
SUFFIXES = (".jsonl", ".parquet")


class Table(Protocol):
    """The rows of one file."""

    path: str
    size: int
    digest: str

    def has(self, row: int) -> bool:
        """Whether row `row`, from 0, exists."""
        ...

    def __len__(self) -> int: ...

    def line(self, row: int) -> int:
        """Where the row stands, from 1: its line in JSON Lines, its number in Parquet."""
        ...

    def row(self, row: int) -> dict[str, Any]:
        """The row's object; raises DataError with file and line when it is not one."""
        ...


def open_table(path: str) -> Table:
    """The table in `path`: Parquet by its suffix, else JSON Lines. Raises DataError when it cannot be read."""
    try:
        return ParquetTable(path) if path.endswith(".parquet") else JsonlTable(path)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror or error}", "pass the path of a data file") from error


class JsonlTable:
    """Lines of JSON, located by an index of byte offsets that grows as rows are asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._closing = weakref.finalize(self, os.close, fd)
        self._index = LineIndex(path, fd)
        self.size = os.fstat(fd).st_size
        self.digest = fingerprint(fd, self.size)

    def has(self, row: int) -> bool:
        return self._index.has(row)

    def __len__(self) -> int:
        return len(self._index)

    def line(self, row: int) -> int:
        return self._index.line(row)

    def row(self, row: int) -> dict[str, Any]:
        return parse_row(self.path, self.line(row), self._index.read(row))


class ParquetTable:
    """Row groups of a Parquet file, decoded when a row of theirs is asked for.

    Arrow gives all structs of a column the same keys and fills those that a row lacks with null; such keys are taken
    out again. Dates become text, and decimals the text of their number.
    """

    def __init__(self, path: str) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self.path = path
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.digest = fingerprint(file.fileno(), self.size)
        try:
            self._file = parquet.ParquetFile(path, memory_map=False)
        except pa.ArrowException as error:
            raise DataError(path, f"is not a Parquet file: {error}", "write the file anew") from error
        groups = [self._file.metadata.row_group(g) for g in range(self._file.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._decoded: OrderedDict[int, Any] = OrderedDict()

    def has(self, row: int) -> bool:
        return row < len(self)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def line(self, row: int) -> int:
        return row + 1

    def row(self, row: int) -> dict[str, Any]:
        number = bisect_right(self._ends, row)
        group = self._group(number)
        offset = row - (self._ends[number - 1] if number else 0)
        (values,) = group.slice(offset, 1).to_pylist()
        return {key: _plain(value) for key, value in values.items()}

    def _group(self, number: int) -> Any:
        import pyarrow as pa

        if number in self._decoded:
            self._decoded.move_to_end(number)
            return self._decoded[number]
        try:
            group = self._file.read_row_group(number)
        except (pa.ArrowException, OSError) as error:
            raise DataError(self.path, f"row group {number} cannot be read: {error}", "write the file anew") from error
        self._decoded[number] = group
        while len(self._decoded) > 1 and sum(g.nbytes for g in self._decoded.values()) > ARROW_BYTES:
            self._decoded.popitem(last=False)
        return group


def _plain(value: Any) -> Any:
    """A Parquet value as JSON has it, nested keys that are null left out."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value


class Part:
    """The rows of a table that a slice takes, as Python counts: negative numbers from the end."""

    def __init__(self, table: Table, rows: slice, name: str) -> None:
        self.table, self.name = table, name
        """`name` is what the user wrote: the file, with its slice."""
        self._slice = rows
        self._simple = (rows.start or 0) >= 0 and (rows.stop is None or rows.stop >= 0)

    @property
    def bounds(self) -> tuple[int, int]:
        """First row, and the one after the last; needs the whole index where the slice's end is not a number from 0."""
        start, stop, _ = self._slice.indices(len(self.table))
        return start, max(start, stop)

    def has(self, row: int) -> bool:
        """Whether the slice has a row `row`; searches no further than needed to tell."""
        if not self._simple:
            return row < len(self)
        start, stop = self._slice.start or 0, self._slice.stop
        return (stop is None or start + row < stop) and self.table.has(start + row)

    def __len__(self) -> int:
        start, stop = self.bounds
        return stop - start

    def line(self, row: int) -> int:
        return self.table.line(self.table_row(row))

    def row(self, row: int) -> dict[str, Any]:
        return self.table.row(self.table_row(row))

    def table_row(self, row: int) -> int:
        """The table's number of row `row` of the slice."""
        return row + ((self._slice.start or 0) if self._simple else self.bounds[0])

    def identity(self) -> Mapping[str, Any]:
        """What must stay the same for a position to mean the same rows; the path is shown but may change."""
        return {"path": self.name, "size": self.table.size, "digest": self.table.digest, "rows": list(self.bounds)}


def open_part(text: str) -> Part:
    """The rows that `FILE` or `FILE@[a:b]` means; raises DataError when there are none, or no such file."""
    path, rows = split_slice(text)
    part = Part(open_table(path), rows, text)
    if not part.table.has(0):
        raise DataError(path, "holds no rows", "write one JSON object a line")
    if not part.has(0):
        raise DataError(text, f"takes none of the {len(part.table)} rows", "widen the slice")
    return part
