"""Telling whether a file is the one that a checkpoint was made with."""

from __future__ import annotations

import os

import xxhash

WHOLE = 1 << 30
"""Files up to this size are hashed whole."""
EDGE, BLOCK, BLOCKS = 64 << 20, 1 << 20, 64
"""Of a larger file: bytes hashed at either end, and 64 blocks of 1 MiB evenly between."""


def fingerprint(fd: int, size: int) -> str:
    """xxh3-64 of the contents up to 1 GiB; of a larger file, of both ends and of blocks between.

    A change of a larger file that keeps its size and lies between the blocks is therefore not seen.
    """
    digest = xxhash.xxh3_64()
    for start, length in _pieces(size):
        end = start + length
        while start < end and (part := os.pread(fd, min(1 << 20, end - start), start)):
            digest.update(part)
            start += len(part)
    return digest.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    if size <= WHOLE:
        return [(0, size)]
    room = size - 2 * EDGE - BLOCK
    between = [(EDGE + room * i // (BLOCKS - 1), BLOCK) for i in range(BLOCKS)]
    return [(0, EDGE), *between, (size - EDGE, EDGE)]
