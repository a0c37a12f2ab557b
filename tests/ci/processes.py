"""Runs a command with a time limit and ends everything it started."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 10.0
"""Seconds a command has to end by itself after an interrupt."""
STRAYS_S = 5.0
"""Seconds in which the processes that a command left may end by themselves: Ray's helpers are slow to notice."""
POLL_S = 0.05
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    """As of `subprocess`: negative for a signal."""
    seconds: float
    timed_out: bool
    strays: tuple[str, ...]
    """Command lines of processes that it left behind, which were killed."""


def adopt_orphans() -> None:
    """Have the processes whose parents die become children of this one, where the system can (Linux).

    A process in a session of its own is in no group that could be killed, but it stays among the descendants.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_command(command: Sequence[str], *, env: Mapping[str, str], log: Path, limit_s: float) -> Ended:
    """Run a command in a session of its own with its output in `log`; none of its processes outlives the call.

    At the limit, and when this process is interrupted, the command is interrupted too; what is still there after a
    while is killed. An interrupt goes on to the caller.
    """
    with log.open("wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        timed_out = False
        wait_strays_s = 0.0
        try:
            timed_out = not _wait(process, limit_s)
            wait_strays_s = 0.0 if timed_out else STRAYS_S
        finally:
            _end(process, min(GRACE_S, limit_s / 2))
            seconds = time.monotonic() - started
            strays = _end_descendants(wait_strays_s)
    return Ended(process.returncode, seconds, timed_out, () if timed_out else strays)


def _wait(process: subprocess.Popen, limit_s: float) -> bool:
    """Whether the process ended in time; orphans that end meanwhile do not stay as zombies, which tests would see."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        if time.monotonic() >= deadline:
            return False
        _reap(but=process.pid)
        time.sleep(POLL_S)
    return True


def _end(process: subprocess.Popen, grace_s: float) -> None:
    """Interrupt, so that fixtures give back what they hold; abort, so that every stack is written; kill the group."""
    for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGABRT, 1.0)):
        if process.poll() is None:
            process.send_signal(number)
            _wait(process, wait_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_descendants(wait_s: float) -> tuple[str, ...]:
    """Kill what is left below this process; returns the command lines of what did not go by itself."""
    deadline = time.monotonic() + wait_s
    killed: dict[int, str] = {}
    while left := _descendants(os.getpid()):
        if time.monotonic() >= deadline:
            for pid in left:
                killed.setdefault(pid, _command_line(pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(POLL_S)
    _reap()
    return tuple(killed.values())


def _descendants(ancestor: int) -> list[int]:
    """Ids of the living processes below one; none where there is no /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    below = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below - {ancestor})


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return str(pid)


def _reap(but: int = 0) -> None:
    """Take the status of adopted orphans that ended, and leave that of one child to its `Popen`."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, 0)
