"""Where the rows of a JSON Lines file begin: found by their line ends, without parsing, eight bytes a row."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from miles.utils.jsonl import mark_length

CHUNK = 1 << 20
"""Bytes that are searched at a time; what fits into the processor's cache is fastest."""
_NEWLINE, _RETURN = 10, 13
_SPACES = b"\t\n\x0b\x0c\r "
_IS_SPACE = np.zeros(256, dtype=np.bool_)
_IS_SPACE[list(_SPACES)] = True


class LineIndex:
    """Byte offsets of the rows of an open file, found as far as they are asked for.

    A row is a line with anything but white space on it. Lines end at a line feed and nowhere else, so a U+2028 inside
    a string, or a carriage return, ends none. Memory: 8 bytes a row and 8 a blank line.

    Raises DataError when the file begins with the mark of an encoding other than UTF-8.
    """

    def __init__(self, name: str, fd: int) -> None:
        self._fd, self.size = fd, os.fstat(fd).st_size
        self._starts: NDArray[np.int64] = np.empty(1024, dtype=np.int64)
        self._count = 0
        self._blanks = array("q")
        """For each blank line, the rows before it; rises."""
        self._scanned = mark_length(name, os.pread(fd, 3, 0))
        """Bytes of the file that were searched."""
        self._at_line_start = True
        self._buffer = bytearray(CHUNK)

    @property
    def complete(self) -> bool:
        """Whether the whole file was searched."""
        return self._scanned >= self.size

    def has(self, row: int) -> bool:
        """Whether row `row`, from 0, exists; searches no further than needed to tell."""
        while row >= self._count and not self.complete:
            self._scan_chunk()
        return row < self._count

    def __len__(self) -> int:
        """Rows of the file; searches all of it."""
        while not self.complete:
            self._scan_chunk()
        return self._count

    def line(self, row: int) -> int:
        """Line number, from 1, of a row."""
        return row + 1 + bisect_right(self._blanks, row)

    def read(self, row: int) -> bytes:
        """The bytes of row `row`, which exists."""
        end = int(self._starts[row + 1]) if self.has(row + 1) else self.size
        start = int(self._starts[row])
        parts: list[bytes] = []
        while start < end and (part := os.pread(self._fd, end - start, start)):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def _scan_chunk(self) -> None:
        base = self._scanned
        count = os.preadv(self._fd, [self._buffer], base)
        if count == 0:  # the file became shorter
            self.size = base
            return
        chunk = np.frombuffer(self._buffer, dtype=np.uint8, count=count)
        ends = np.flatnonzero(chunk == _NEWLINE)
        starts = ends + 1
        if self._at_line_start:
            starts = np.concatenate((np.zeros(1, dtype=np.int64), starts))
        self._at_line_start = bool(starts.size and starts[-1] == count)
        if self._at_line_start:
            starts = starts[:-1]
        blank = self._blank(chunk, starts, base)
        if blank.any():
            rows_before = self._count + np.cumsum(~blank)[blank]
            self._blanks.frombytes(rows_before.astype(np.int64).tobytes())
            starts = starts[~blank]
        self._scanned = base + count
        self._append(starts + base)

    def _blank(self, chunk: NDArray[np.uint8], starts: NDArray[np.int64], base: int) -> NDArray[np.bool_]:
        """Which of the lines that begin in the chunk hold white space alone."""
        blank = _IS_SPACE[chunk[starts]]
        for i in np.flatnonzero(blank):
            start = int(starts[i])
            if chunk[start] == _NEWLINE:
                continue
            end = int(starts[i + 1]) if i + 1 < len(starts) else len(chunk)
            if chunk[start:end].tobytes().strip():
                blank[i] = False
            elif i + 1 == len(starts) and chunk[-1] != _NEWLINE:
                blank[i] = self._blank_from(base + len(chunk))
        return blank

    def _blank_from(self, offset: int) -> bool:
        """Whether nothing but white space comes before the next line end."""
        while part := os.pread(self._fd, 4096, offset):
            line, newline, _ = part.partition(b"\n")
            if line.strip():
                return False
            if newline:
                return True
            offset += len(part)
        return True

    def _append(self, starts: NDArray[np.int64]) -> None:
        needed = self._count + len(starts)
        if needed > len(self._starts):
            # Pages that are never written take no memory, so a generous guess costs nothing.
            by_density = int(needed * 1.05 * self.size / max(self._scanned, 1))
            grown = np.empty(max(by_density, 2 * len(self._starts)), dtype=np.int64)
            grown[: self._count] = self._starts[: self._count]
            self._starts = grown
        self._starts[self._count : needed] = starts
        self._count = needed
