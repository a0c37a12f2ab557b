"""One cell of the kill matrix: start a run, kill one of its processes at one point of the loop, see how it ends.

The table of docs/developer/reliability.md is the expectation: the tests read it.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fast.ray.conftest import ROOT, Outcome, TrainProcess, metrics

DOC = ROOT / "docs" / "developer" / "reliability.md"
STEPS = 8
KILL_FROM_STEP = 2
BATCH = 4

COMMAND_LINES = {
    "driver": "train.py",
    "rollout manager": "ray::RolloutManager",
    "router": "miles.router",
    "engine's server": "miles.backends.torch_engine",
    "engine's actor": "ray::EngineActor",
    "trainer rank": "ray::TrainActor",
    "raylet": "raylet/raylet",
    "gcs_server": "gcs/gcs_server",
}
"""What the command line of each kind of process holds. The trainer has two ranks, and the one started last is killed."""


@dataclass(frozen=True)
class Cell:
    """A row and a column of the table, and what stands there."""

    victim: str
    point: str
    outcome: str
    told: str
    """The words by which a run that stops names the cause; empty where nothing can be said."""

    def __str__(self) -> str:
        return f"{self.victim}-{self.point}"


def cells() -> Iterator[Cell]:
    """The cells of the table headed `| killed |`."""
    rows = [
        [text.strip() for text in line.strip("|").split("|")]
        for line in DOC.read_text().splitlines()
        if line.startswith("|")
    ]
    head = next(i for i, row in enumerate(rows) if row[0] == "killed")
    points = rows[head][1:-1]
    for victim, *outcomes, told in rows[head + 2 : head + 2 + len(COMMAND_LINES)]:
        for point, outcome in zip(points, outcomes, strict=True):
            yield Cell(victim, point, outcome, told.strip("`"))


def flags_of_run(task: Path, run_dir: Path) -> list[str]:
    """A short GRPO run that passes every point of the loop in every step."""
    return [
        "--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "train.jsonl"), "--label-key", "label",
        "--custom-rm-path", "tests.e2e.kill_matrix.reward_after_a_moment", "--run-dir", str(run_dir),
        "--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2",
        "--rollout-max-response-len", "6", "--lr", "1e-4", "--num-rollout", str(STEPS), "--torch-threads", "1",
        "--train-ranks", "2", "--num-cpus", "4", "--save-interval", "1", "--keep-last", "2", "--eval-interval", "1",
        "--eval-prompt-data", "held", f"{task / 'heldout.jsonl'}@[0:8]",
    ]  # fmt: skip


async def reward_after_a_moment(args, sample, **kwargs):
    import asyncio

    await asyncio.sleep(0.1)
    return sum(c.isdigit() for c in sample.response) / 6


def kill_in_phase(train: TrainProcess, run_dir: Path, cell: Cell) -> int:
    """Kill the cell's process when the phase begins; returns the step."""
    step = _await_phase(train, run_dir / "events.jsonl", cell.point)
    victim(train, cell.victim).kill()
    return step


def _await_phase(train: TrainProcess, events: Path, phase: str) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert train.process.poll() is None, train.end().err
        lines = events.read_text().splitlines() if events.exists() else []
        for line in lines[-3:]:
            event = json.loads(line) if line.endswith("}") else {}
            if event.get("phase") == phase and (event["step"] or 0) >= KILL_FROM_STEP:
                return event["step"]
        time.sleep(0.002)
    raise AssertionError(f"the run never came to {phase}")


def victim(train: TrainProcess, name: str) -> psutil.Process:
    """The process of a run by its name in the table."""
    driver = psutil.Process(train.process.pid)
    if name == "driver":
        return driver
    found = [p for p in driver.children(recursive=True) if COMMAND_LINES[name] in " ".join(p.cmdline())]
    return max(found, key=lambda p: p.pid)


def check(cell: Cell, ended: Outcome, run_dir: Path) -> None:
    """The run ended as the table says."""
    assert "Traceback" not in ended.err, ended.err
    assert ended.left_behind == []
    if cell.outcome == "goes on":
        assert ended.status == 0, ended.err
        rows = [row for row in metrics(run_dir) if "ledger/trained" in row]
        assert [row["step"] for row in rows] == list(range(STEPS))
        assert rows[-1]["ledger/trained"] == (STEPS - 1) * BATCH  # noted when the last batch is generated
    elif cell.outcome == "stops":
        assert ended.status == 1, (ended.status, ended.out, ended.err)
        assert re.search(re.escape(cell.told).replace("N", r"\d+"), ended.err), ended.err
    else:
        assert cell.outcome == "is gone"
        assert ended.status == -9


def check_resume(task: Path, run_dir: Path, resumed: Path) -> None:
    """The last checkpoint resumes and the ledger counts every prompt once."""
    ended = TrainProcess(*flags_of_run(task, resumed), "--load", str(run_dir / "checkpoints")).end()
    assert ended.status == 0, ended.err
    rows = [row for row in metrics(resumed) if "ledger/trained" in row]
    assert rows[-1]["step"] == STEPS - 1
    assert rows[-1]["ledger/trained"] == (STEPS - 1) * BATCH  # noted when the last batch is generated
