"""A tiny task, and whole runs of train.py in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from examples.quickstart import make_task

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Outcome:
    """What a run left."""

    status: int
    out: str
    err: str
    left_behind: list[str]


IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
"""What a shell does to a command it starts with `&`: it ignores interrupts."""


class TrainProcess:
    """`python train.py FLAGS`; every process it starts inherits a mark by which strays are found."""

    def __init__(self, *flags: str, background: bool = False, modules: Path | None = None) -> None:
        """`modules` is a folder beside the repository in which it finds functions that settings name."""
        self.mark = f"miles-test-{uuid.uuid4().hex}"
        # A child inherits ignored signals, and this suite may itself run in the background; one that is handled is reset.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        path = os.pathsep.join(str(folder) for folder in (ROOT, modules) if folder)
        self.process = subprocess.Popen(
            [*(IN_BACKGROUND if background else []), sys.executable, str(ROOT / "train.py"), *flags],
            cwd=ROOT,
            env={**os.environ, "MILES_TEST_MARK": self.mark, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout_s: float = 240, gone_within_s: float = 5) -> Outcome:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return Outcome(self.process.returncode, out, err, self._strays(gone_within_s))

    def _strays(self, within_s: float) -> list[str]:
        for _ in range(round(within_s / 0.1)):
            strays = [p for p in psutil.process_iter() if self._is_ours(p)]
            if not strays:
                return []
            time.sleep(0.1)
        return [" ".join(p.cmdline()) for p in strays]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("MILES_TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("task")
    make_task.main(["--out", str(out), "--seed", "1"])
    return out


@pytest.fixture
def flags(task, tmp_path):
    """Flags of a GRPO run of two short steps."""
    return [
        "--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "train.jsonl"), "--label-key", "label",
        "--run-dir", str(tmp_path / "run"), "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
        "--num-steps-per-rollout", "2", "--rollout-max-response-len", "6", "--lr", "1e-4", "--num-rollout", "2",
        "--torch-threads", "1",
    ]  # fmt: skip


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
