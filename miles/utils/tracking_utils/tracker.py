"""`RunTracker`: each step's metrics to `metrics.jsonl`, TensorBoard, the console and `curve.png`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.curve import draw_curve
from miles.utils.tracking_utils.events import JsonLines
from miles.utils.tracking_utils.tensorboard_writer import TensorBoardWriter

CURVE_INTERVAL_S = 60.0
CURVE_PREFIXES = ("rollout/reward", "eval/")


class RunTracker:
    """Writes metrics down, each call durably before it returns."""

    def __init__(self, run_dir: Path, name: str, console: Console, *, use_tensorboard: bool) -> None:
        self._curve_path = run_dir / "curve.png"
        self._name = name
        self._console = console
        self._lines = JsonLines(run_dir / "metrics.jsonl")
        self._board = TensorBoardWriter(run_dir / "tensorboard") if use_tensorboard else None
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._drawn_at = time.monotonic()
        self._step_at: float | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write `metrics` of `step`; may be called several times a step with different names.

        The call that brings `perf/train_time` gets `perf/step_time`, the seconds since the last such call.
        """
        now = time.monotonic()
        if "perf/train_time" in metrics:
            if self._step_at is not None:
                metrics = {**metrics, "perf/step_time": now - self._step_at}
            self._step_at = now
        self._lines.write({"step": step, "time": round(time.time(), 3), **metrics})
        if self._board:
            self._board.log(step, metrics)
        for name, value in metrics.items():
            if name == CURVE_PREFIXES[0] or (name.startswith(CURVE_PREFIXES[1]) and name.count("/") == 1):
                self._series.setdefault(name, []).append((step, value))
        self._console.metrics(step, metrics)
        if now - self._drawn_at > CURVE_INTERVAL_S:
            self._draw()

    def close(self) -> None:
        """Draw the curve a last time and close the files."""
        self._draw()
        self._lines.close()
        if self._board:
            self._board.close()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._series:
            draw_curve(self._curve_path, self._name, self._series)
