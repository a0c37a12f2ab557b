"""Child processes that end with their owner: start, wait until ready, stop by process id."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.errors import EngineError

TOKEN_VARIABLE = "MILES_API_KEY"
"""Environment variable that carries the token of control routes: a command line is seen by every user of a machine."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere `watch_stdin` does it alone)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_stdin(on_close: Callable[[], None] = lambda: os._exit(0)) -> None:
    """Call `on_close` from a thread when standard input closes: the owner's end of the control pipe is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        on_close()

    threading.Thread(target=wait, name="control-pipe", daemon=True).start()


def report_ready(fd: int, facts: Mapping[str, Any]) -> None:
    """Tell the owner, once, through the inherited descriptor: `{"port": ...}`, or `{"error": ...}`."""
    os.write(fd, json.dumps(dict(facts)).encode() + b"\n")
    os.close(fd)


def last_lines(log_path: str | Path, count: int = 15) -> str:
    """The end of a log file; empty when there is none."""
    try:
        return "\n".join(Path(log_path).read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return ""


class ServerProcess:
    """A server of ours in its own process.

    The command gets `--ready-fd N` appended and reports one JSON line there. Its output goes to `log_path`; its
    standard input is the control pipe, which closes when this process ends.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: str | Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = str(log_path)
        self.facts: dict[str, Any] = {}
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        self._ready_fd, write_fd = os.pipe()
        os.set_inheritable(write_fd, True)
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--ready-fd", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env={**os.environ, **(env or {})},
            )
        os.close(write_fd)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Block until the process has reported; returns its facts, such as the port.

        Raises EngineError when it reports an error, ends, or says nothing for `timeout_s` seconds; it is stopped then.
        """
        deadline = time.monotonic() + timeout_s
        received = b""
        while b"\n" not in received:
            readable, _, _ = select.select([self._ready_fd], [], [], max(0.0, min(0.2, deadline - time.monotonic())))
            if readable:
                piece = os.read(self._ready_fd, 65536)
                if not piece:
                    self._fail(f"ended before it was ready (exit code {self._process.wait(timeout=10)})")
                received += piece
            elif time.monotonic() > deadline:
                self._fail(f"was not ready after {timeout_s:.0f} s; raise cluster.start_timeout_s if it needs longer")
        os.close(self._ready_fd)
        self.facts = json.loads(received)
        if "error" in self.facts:
            self._fail(str(self.facts["error"]))
        return self.facts

    async def wait_ready_async(self, timeout_s: float) -> dict[str, Any]:
        """`wait_ready` in a thread."""
        return await asyncio.to_thread(self.wait_ready, timeout_s)

    def _fail(self, problem: str) -> None:
        self.stop()
        raise EngineError(problem, engine=self.name, log_path=self.log_path, last_lines=last_lines(self.log_path))

    def stop(self, grace_s: float = 5.0) -> None:
        """End the process: close its control pipe, terminate, and kill after `grace_s` seconds."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
