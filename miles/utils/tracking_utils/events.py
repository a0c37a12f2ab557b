"""`events.jsonl`: what happened when, one line an event, written through at once."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.utils.disk import append_whole, drop_cut_line, write_failure


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The same mapping with NaN and infinities as None, so that the JSON stays valid."""
    return {k: (v if not isinstance(v, float) or math.isfinite(v) else None) for k, v in metrics.items()}


class JsonLines:
    """An append-only JSONL file whose every line is handed to the system, whole, before the call returns.

    Opening one that a killed process left with half a line at its end removes that half. Raises MilesError when the
    file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._fd = -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            drop_cut_line(self._fd)
        except OSError as e:
            self.close()
            raise write_failure(path, e) from e

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object; the file stays as it was when there is no room for all of it."""
        line = json.dumps(finite(row), ensure_ascii=False, default=str) + "\n"
        try:
            append_whole(self._fd, line.encode("utf-8", "backslashreplace"))
        except OSError as e:
            raise write_failure(self._path, e) from e

    def close(self) -> None:
        """Close the file; further writes raise MilesError."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class EventLog:
    """Dated events of one run."""

    def __init__(self, path: str | Path) -> None:
        self._lines = JsonLines(path)

    def add(self, event: str, **facts: Any) -> None:
        """Note that `event` happened now."""
        self._lines.write({"time": round(time.time(), 3), "event": event, **facts})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
