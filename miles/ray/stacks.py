"""Stacks of the processes of a run, asked for from outside: by a signal that each answers itself, and with py-spy."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from miles.utils.heartbeat import STACKS_END, STACKS_SIGNAL

ANSWER_S = 3.0
"""Seconds the processes have to write their stacks; those of tasks come with the next heartbeat."""
PY_SPY_S = 20.0
"""Seconds py-spy has for all processes."""


def collect(answering: Mapping[str, int], silent: Mapping[str, int], waits_dir: Path, out: Path) -> str:
    """Append the stacks of threads and tasks of all processes (role -> pid) to the file `out`; returns what to tell of it.

    `answering` are those that had a heartbeat and are not stopped: the signal would end another one. They answer it
    without their interpreter, so one whose event loop is stuck does too. py-spy, where it is installed, also shows native code.
    """
    sizes = {role: _signal(pid, waits_dir / f"{role}.stacks") for role, pid in answering.items()}
    deadline = time.monotonic() + ANSWER_S
    with open(out, "ab") as file:
        for role, pid in answering.items():
            _title(file, f"{role}, process {pid}")
            file.write(_answer(waits_dir / f"{role}.stacks", sizes[role], deadline))
        for role, pid in silent.items():
            _title(file, f"{role}, process {pid}")
            file.write(b"it is stopped, or has no heartbeat: its stacks are not asked for\n")
        problem = _py_spy({**answering, **silent}, file)
    return f"stacks: {out}" + (f" ({problem})" if problem else "")


def _title(file: IO[bytes], text: str) -> None:
    file.write(f"\n==== {text}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())


def _signal(pid: int, answers: Path) -> int:
    """Ask for the stacks; returns how long the file of answers was before."""
    size = answers.stat().st_size
    try:
        os.kill(pid, STACKS_SIGNAL)
    except ProcessLookupError:  # it has ended since the graph was drawn; the missing answer says so
        return size
    return size


def _answer(answers: Path, size: int, deadline: float) -> bytes:
    while True:
        with open(answers, "rb") as file:
            file.seek(size)
            text = file.read()
        if text.endswith(STACKS_END):
            return text.removesuffix(STACKS_END)
        if time.monotonic() >= deadline:
            return text or f"no answer in {ANSWER_S:g} s\n".encode()
        time.sleep(0.05)


def _py_spy(processes: Mapping[str, int], file: IO[bytes]) -> str:
    """Add py-spy's stacks; returns in one line why not, where it could not."""
    command = shutil.which("py-spy")
    if command is None:
        return ""
    problem, deadline = "", time.monotonic() + PY_SPY_S
    for role, pid in processes.items():
        _title(file, f"py-spy: {role}, process {pid}")
        file.flush()
        ask = [command, "dump", "--native", "--pid", str(pid)]
        try:
            done = subprocess.run(ask, capture_output=True, timeout=max(0.1, deadline - time.monotonic()))
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"py-spy on {role}: {error}"
            continue
        file.write(done.stdout + done.stderr)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
            problem = f"py-spy on {role}: {said[0]}"
    return problem
