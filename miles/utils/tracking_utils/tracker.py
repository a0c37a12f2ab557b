"""`RunTracker`: each step's metrics to `metrics.jsonl`, TensorBoard, the console and `curve.png`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.errors import MilesError
from miles.utils.jsonl import read_jsonl
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.curve import draw_curve
from miles.utils.tracking_utils.events import JsonLines
from miles.utils.tracking_utils.tensorboard_writer import TensorBoardWriter

CURVE_INTERVAL_S = 60.0
CURVE_PREFIXES = ("rollout/reward", "eval/")


class RunTracker:
    """Writes metrics down, each call durably before it returns.

    `metrics.jsonl` is the record: a row that cannot be written ends the run with a MilesError. What is only drawn from
    the same numbers is told once when it cannot be, and the run goes on. A run resumed in its own folder goes on with
    its files and curve.
    """

    def __init__(self, run_dir: Path, name: str, console: Console, *, use_tensorboard: bool) -> None:
        self._curve_path = run_dir / "curve.png"
        self._name = name
        self._console = console
        self._lines = JsonLines(run_dir / "metrics.jsonl")
        self._series: dict[str, dict[int, float]] = {}
        self._last_step: int | None = None
        if (run_dir / "metrics.jsonl").is_file():
            for _, row in read_jsonl(run_dir / "metrics.jsonl"):
                self._add_points(row["step"], row)
        self._drawn_at: float | None = None
        self._step_at: float | None = None
        self._curve_told = False
        self._board: TensorBoardWriter | None = None
        if use_tensorboard:
            try:
                self._board = TensorBoardWriter(run_dir / "tensorboard")
            except MilesError as e:
                self._tell("TensorBoard gets nothing from this run", e)

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
            try:
                self._board.log(step, metrics)
            except MilesError as e:
                self._tell("TensorBoard gets nothing more from this run", e)
                self._board = None
        self._add_points(step, metrics)
        self._console.metrics(step, metrics)
        if self._drawn_at is None or now - self._drawn_at > CURVE_INTERVAL_S:
            self._draw()

    def _add_points(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._last_step is not None and step < self._last_step:  # a resumed run went back: those steps come again
            for points in self._series.values():
                for undone in [s for s in points if s > step]:
                    del points[undone]
        self._last_step = step
        for name, value in metrics.items():
            is_curve = name == CURVE_PREFIXES[0] or (name.startswith(CURVE_PREFIXES[1]) and name.count("/") == 1)
            if is_curve and value is not None:
                self._series.setdefault(name, {})[step] = value

    def close(self) -> None:
        """Draw the curve a last time and close the files."""
        self._draw()
        self._lines.close()
        if self._board:
            self._board.close()

    def _draw(self) -> None:
        if not self._series:
            return
        self._drawn_at = time.monotonic()
        try:
            draw_curve(
                self._curve_path, self._name, {name: [*points.items()] for name, points in self._series.items()}
            )
        except MilesError as e:
            if not self._curve_told:
                self._tell(f"{self._curve_path.name} stays as it is until it can be drawn again", e)
            self._curve_told = True

    def _tell(self, what: str, error: MilesError) -> None:
        self._console.say(f"  {what}, and the run goes on: {str(error).splitlines()[0]}", style="yellow")
