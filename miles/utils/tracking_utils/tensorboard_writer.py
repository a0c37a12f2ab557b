"""TensorBoard event files without importing torch."""

from __future__ import annotations

import io
import math
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.utils.disk import append_whole, write_failure


class TensorBoardWriter:
    """Scalars of a run in a new file under `folder`; every call writes through. Raises MilesError when it cannot.

    Written here and not by TensorBoard's own writer, whose thread prints a traceback when a disk is full.
    """

    def __init__(self, folder: str | Path) -> None:
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        )
        self._path, self._fd = Path(folder) / name, -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise write_failure(self._path, e) from e
        self._write(file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write finite metrics at `step`."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=k, simple_value=float(v)) for k, v in metrics.items() if math.isfinite(v)]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        try:
            append_whole(self._fd, record.getvalue())
        except OSError as e:
            self.close()
            raise write_failure(self._path, e) from e

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
