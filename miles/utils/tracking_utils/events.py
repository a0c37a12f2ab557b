"""`events.jsonl`: what happened when, one line an event, written through at once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The same mapping with NaN and infinities as None, so that the JSON stays valid."""
    return {k: (v if not isinstance(v, float) or math.isfinite(v) else None) for k, v in metrics.items()}


class JsonLines:
    """An append-only JSONL file whose every line is on its way to disk before the call returns."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as this object

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(finite(row), ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes raise ValueError."""
        self._file.close()


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
