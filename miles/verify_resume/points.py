"""Moments of a run at which it may be killed, told from what the run has written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASES = ("generate", "train", "save", "publish", "evaluate")
"""What a step does, in order."""
SECONDS = {
    "generate": "perf/generate_time",
    "train": "perf/train_time",
    "save": "perf/save_time",
    "publish": "perf/update_weights_time",
    "evaluate": "perf/eval_time",
}
"""Metric that tells how long each phase took."""
POLL_S = 0.005


@dataclass(frozen=True, slots=True, order=True)
class KillPoint:
    """A moment: so much of a phase of a step has passed."""

    step: int
    place: int = field(repr=False)
    """Position of the phase in a step."""
    fraction: float

    @classmethod
    def at(cls, step: int, phase: str, fraction: float) -> KillPoint:
        """Raises ValueError when there is no such phase."""
        return cls(step, PHASES.index(phase), fraction)

    @property
    def phase(self) -> str:
        """One of `PHASES`."""
        return PHASES[self.place]

    def __str__(self) -> str:
        return f"{self.step}.{self.phase}:{self.fraction:g}"


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` holds so far."""
    return _rows(run_dir / "metrics.jsonl")


def begun(run_dir: Path, point: KillPoint) -> bool:
    """Whether the run has come to the phase of `point`."""
    if point.phase == "save":  # noted by what comes before it, since a save in the background begins in several ways
        return any(row.get("step") == point.step and SECONDS["train"] in row for row in metric_rows(run_dir))
    events = _rows(run_dir / "events.jsonl")
    return any(e["event"] == "phase" and (e["phase"], e["step"]) == (point.phase, point.step) for e in events)


def seconds_of(run_dir: Path, point: KillPoint) -> float:
    """How long the phase of `point` took in a run that has ended; 0 when it was not measured."""
    key = SECONDS[point.phase]
    return max((row[key] for row in metric_rows(run_dir) if row.get("step") == point.step and key in row), default=0.0)


def wait_for(condition: Callable[[], bool], ended: Callable[[], bool]) -> bool:
    """Wait until `condition` holds; False when the run ended before."""
    while not condition():
        if ended():
            return False
        time.sleep(POLL_S)
    return True


def _rows(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that is being written; none before there is such a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]
