"""Safetensors files byte by byte, without loading torch: two NaN of the same bits are equal here, and 0 is not -0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8}
"""Data types whose values can be shown."""
BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of one value; 1 for any other data type."""


def read_raw(path: Path) -> dict[str, tuple[dict[str, Any], memoryview]]:
    """Header entry (`dtype`, `shape`) and bytes of every tensor of a file, by name; raises ValueError when it is none."""
    data = memoryview(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    found: dict[str, tuple[dict[str, Any], memoryview]] = {}
    for name, entry in header.items():
        begin, end = entry.pop("data_offsets")
        found[name] = (entry, data[start + begin : start + end])
    return found


def difference(a: Path, b: Path) -> tuple[int, str | None]:
    """Tensors compared, and the first that differs in words; None when all are equal."""
    first, second = read_raw(a), read_raw(b)
    if missing := sorted(first.keys() ^ second.keys()):
        return len(first), f"{missing[0]}: only in one of the two"
    for name in sorted(first):
        (entry, data), (other_entry, other) = first[name], second[name]
        if entry != other_entry:
            return len(first), f"{name}: {entry} and {other_entry}"
        if data != other:
            return len(first), f"{name}: {_in_words(entry, data, other)}"
    return len(first), None


def _in_words(entry: dict[str, Any], data: memoryview, other: memoryview) -> str:
    width = BYTES.get(entry["dtype"], 1)
    raw, other_raw = (np.frombuffer(d, np.uint8).reshape(-1, width) for d in (data, other))
    places = np.flatnonzero((raw != other_raw).any(axis=1))
    at = np.unravel_index(places[0], tuple(entry["shape"])) if entry["shape"] else ()
    text = f"{len(places)} of {len(raw)} values differ, first at {[int(i) for i in at]}"
    if kind := NUMPY.get(entry["dtype"]):
        text += f": {np.frombuffer(data, kind)[places[0]]!r} and {np.frombuffer(other, kind)[places[0]]!r}"
    return text
