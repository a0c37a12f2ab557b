"""Runs of `train.py` as child processes: to the end, or until they are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from miles.errors import MilesError, StalledError
from miles.utils.process import die_with_parent, last_lines

ENTRY = Path(__file__).resolve().parents[2] / "train.py"
MARK = "MILES_VERIFY_RESUME"
"""Environment variable by which everything that a run starts is found."""
GONE_TIMEOUT_S = 120.0
"""Seconds within which nothing of a killed run may be left; two helpers of Ray's notice after up to 60."""
END_TIMEOUT_S = 30.0
POLL_S = 0.1


class Life:
    """One run of `train.py` in a process of its own, from its start to its end; its output goes to `log_path`."""

    def __init__(self, run_dir: Path, argv: Sequence[str], log_path: Path) -> None:
        self.run_dir, self.log_path = run_dir, log_path
        self._mark = uuid.uuid4().hex
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ENTRY), *argv, "--run-dir", str(run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def ended(self) -> bool:
        """Whether the driver has ended."""
        return self._process.poll() is not None

    def finish(self) -> None:
        """Wait for the driver to end by itself; raises MilesError with its last lines when it failed."""
        self.check_status(self._process.wait())

    def check_status(self, status: int | None = None) -> None:
        """Raise MilesError with the run's last lines unless it ended well."""
        status = self._process.poll() if status is None else status
        if status != 0:
            lines = last_lines(self.log_path).replace("\n", "\n    | ")
            raise MilesError(
                f"the run in {self.run_dir} ended with status {status}:\n    | {lines}\n    fix: see {self.log_path}"
            )

    def kill(self) -> bool:
        """SIGKILL the driver, which gets no chance to end its children; False when it had ended already."""
        if self.ended():
            return False
        self._process.kill()
        self._process.wait()
        return True

    def wait_gone(self) -> float:
        """Seconds until no process of the run was left; raises StalledError when some stay."""
        started_at = time.monotonic()
        while left := self._left():
            if time.monotonic() - started_at > GONE_TIMEOUT_S:
                names = "; ".join(f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in left)
                raise StalledError(f"{GONE_TIMEOUT_S:.0f} s after the driver was killed, these still run: {names}")
            time.sleep(POLL_S)
        return time.monotonic() - started_at

    def close(self) -> None:
        """End the run, if it is still there, and everything that it started."""
        if not self.ended():
            self._process.terminate()
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for process in self._left():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _left(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False
