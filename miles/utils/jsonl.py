"""Reading JSON Lines: one object a line, and an error that names file and line when it is not."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from miles.errors import DataError

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$", re.DOTALL)

_OTHER_ENCODINGS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield `(line number from 1, object)` of each row, reading as it goes.

    Blank lines are skipped and a UTF-8 byte order mark is ignored. Raises DataError with file and line when the file
    cannot be read, a line is not JSON, or its value is not an object.
    """
    name = str(path)
    try:
        with open(path, "rb") as file:
            yield from _rows(name, file)
    except OSError as error:
        raise DataError(name, f"cannot be read: {error.strerror}", "pass the path of a JSONL file") from error


def _rows(name: str, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in enumerate(lines, 1):
        if number == 1:
            raw = raw[mark_length(name, raw) :]
        if raw.strip():
            yield number, parse_row(name, number, raw)


def mark_length(name: str, start: bytes) -> int:
    """Bytes of the UTF-8 byte order mark with which a file begins; raises DataError for the mark of another encoding."""
    for mark, encoding in _OTHER_ENCODINGS.items():
        if start.startswith(mark):
            raise DataError(name, f"is {encoding}, not UTF-8", "save the file as UTF-8")
    return len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0


def parse_row(name: str, number: int, raw: bytes) -> dict[str, Any]:
    """The object on line `number` of file `name`; raises DataError with both when it is not one."""
    try:
        text = raw.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            name, f"is not UTF-8 at byte {error.start} of the line", "save the file as UTF-8", line=number
        ) from error
    return _parse(name, number, text)


def _parse(name: str, number: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            name, f"is not JSON: {detail}: {_shorten(text)}", "mend or remove this line", line=number
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            name,
            f"holds a JSON {_kind(row)}, not an object: {_shorten(text)}",
            'write one object a line: {"input": "...", "label": "..."}',
            line=number,
        )
    return row


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {"list": "array", "str": "string", "bool": "boolean"}.get(type(value).__name__, "number")


def split_slice(path: str) -> tuple[str, slice]:
    """The file and the rows meant by `FILE@[a:b]`; every row of a plain path. Negative numbers count from the end."""
    match = _SLICE.match(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(text) if text not in ("", "-") else None for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)
