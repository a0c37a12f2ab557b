"""Child processes that end with their owner: start, wait until ready, stop by process id."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from miles.errors import EngineError
from miles.utils import heartbeat
from miles.utils.disk import write_failure

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "MILES_API_KEY"
"""Environment variable that carries the token of control routes: a command line is seen by every user of a machine."""
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.2
_POLL_S = 0.02
_EXIT_S = 10.0
_END_BYTES = 1 << 16


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
        with open(log_path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _END_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-count:])
    except OSError:
        return ""


class ServerProcess:
    """A server of ours in its own process, which may have children: they are a process group, and end together.

    The command gets `--ready-fd N` appended and reports one JSON line there. Its output goes to `log_path`; its
    standard input is the control pipe, which closes when this process ends. Start it in a thread that lives as long:
    Linux takes the end of the starting thread for the death of the parent. Raises MilesError when the log cannot be
    written, EngineError when the command cannot be started.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: str | Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = str(log_path)
        self.facts: dict[str, Any] = {}
        self._reaping = threading.Lock()
        try:
            Path(log_path).parent.mkdir(parents=True, exist_ok=True)
            log = open(log_path, "ab")  # noqa: SIM115 - closed below
        except OSError as e:
            raise write_failure(log_path, e) from e
        self._ready_fd, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--ready-fd", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env={**os.environ, **heartbeat.environment_of(name), **(env or {})},
                start_new_session=True,
            )
        except OSError as e:
            os.close(self._ready_fd)
            raise EngineError(f"cannot be started: {e}; check that {command[0]} is there", engine=name) from e
        finally:
            log.close()
            os.close(write_fd)
        heartbeat.CHILDREN[name] = self._process.pid

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit status, or None while it runs. Children that an ended server left are killed."""
        with self._reaping:
            if self._process.returncode is None and _has_ended(self._process.pid):
                # It is not reaped yet, so its id is still the group's and nobody else's.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.poll()

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Block until the process has reported; returns its facts, such as the port.

        Raises EngineError when it reports an error, ends, or says nothing for `timeout_s` seconds; it is stopped then.
        """
        try:
            self.facts = json.loads(self._receive_facts(time.monotonic() + timeout_s, timeout_s))
        finally:
            os.close(self._ready_fd)
        if "error" in self.facts:
            self._fail(str(self.facts["error"]))
        return self.facts

    def _receive_facts(self, deadline: float, timeout_s: float) -> bytes:
        received = b""
        while b"\n" not in received:
            status = self.exit_code()  # before looking: what it said before it ended is there already
            left_s = 0.0 if status is not None else max(0.0, min(_LOOK_S, deadline - time.monotonic()))
            readable, _, _ = select.select([self._ready_fd], [], [], left_s)
            if readable:
                piece = os.read(self._ready_fd, 65536)
                if not piece:
                    status = self._wait(_EXIT_S)
                    how = "closed its side" if status is None else "ended"
                    self._fail(f"{how} before it was ready (exit code {status})")
                received += piece
            elif status is not None:  # a child of it may hold the pipe open
                self._fail(f"ended before it was ready (exit code {status})")
            elif time.monotonic() > deadline:
                self._fail(f"was not ready after {timeout_s:.0f} s; raise cluster.start_timeout_s if it needs longer")
        return received

    async def wait_ready_async(self, timeout_s: float) -> dict[str, Any]:
        """`wait_ready` in a thread."""
        return await asyncio.to_thread(self.wait_ready, timeout_s)

    def _fail(self, problem: str) -> NoReturn:
        self.stop()
        raise EngineError(problem, engine=self.name, log_path=self.log_path, last_lines=last_lines(self.log_path))

    def stop(self, grace_s: float = 5.0) -> None:
        """End the process: close its control pipe, terminate, and kill it after `grace_s` seconds; then its children."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        if self.exit_code() is None:
            self._process.terminate()
            if self._wait(grace_s) is None:
                self._process.kill()
                if self._wait(_EXIT_S) is None:
                    logger.warning("%s: process %d does not end, not even when killed", self.name, self.pid)

    def _wait(self, timeout_s: float) -> int | None:
        """Exit status, or None when it still runs after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (status := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return status


def _has_ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
