"""TensorBoard event files without importing torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoardWriter:
    """Scalars of a run under `folder`; every call is flushed."""

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write finite metrics at `step`."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=k, simple_value=float(v)) for k, v in metrics.items() if math.isfinite(v)]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
