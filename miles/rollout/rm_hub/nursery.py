"""The owner's side of the process that workers are forked from, and of the workers."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from miles.errors import HookError
from miles.rollout.rm_hub.worker import COMMAND, NOTE

_WORKER_FILE = Path(__file__).with_name("worker.py")
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a nursery is started with."""

    function: str
    """Import path, or `FILE.py:NAME` for a function of the standard library alone."""
    memory_bytes: int
    """Address space of each worker."""
    clean: bool = False
    """Start the interpreter without site packages, the working directory or any environment."""


class Nursery:
    """One process that has the function loaded and forks workers. Used by one thread, which must outlive it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.is_ready = False
        self.started_at = time.monotonic()
        self._received = bytearray()
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, *(("-S", "-s", "-P") if settings.clean else ("-P",)), str(_WORKER_FILE)]
        environment = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"} if settings.clean else None
        try:
            # What the function prints must not disturb the owner's output.
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=sys.__stderr__, env=environment)
        except OSError as error:
            self.socket.close()
            raise HookError(settings.function, f"its worker process cannot be started: {error}") from error
        finally:
            theirs.close()
        greeting = {
            "sys_path": None if settings.clean else sys.path,
            "function": settings.function,
            "memory_bytes": settings.memory_bytes,
        }
        with contextlib.suppress(OSError):  # it has ended, which the first read tells
            self.socket.sendall(json.dumps(greeting).encode() + b"\n")
        self.socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def read_greeting(self) -> bool:
        """Read what has come; whether the process is ready. Raises HookError when it ended or cannot load the function."""
        while b"\n" not in self._received:
            try:
                piece = self.socket.recv(1)
            except BlockingIOError:
                return False
            except OSError:
                piece = b""
            if not piece:
                raise HookError(self.settings.function, f"its worker process {self._how_it_ended()}")
            self._received += piece
        reply = json.loads(self._received)
        self._received.clear()
        if "failed" in reply:
            problem = f"cannot be imported in a worker process: {reply['failed']}"
            raise HookError(self.settings.function, problem, "install what is missing")
        self.is_ready = True
        return True

    def read_notes(self) -> list[tuple[bytes, int, int]] | None:
        """`(what, worker, value)` of all that has come; None when the process has ended."""
        try:
            piece = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not piece:
            return None
        self._received += piece
        whole = len(self._received) // NOTE.size * NOTE.size
        notes = list(NOTE.iter_unpack(bytes(self._received[:whole])))
        del self._received[:whole]
        return notes

    def fork(self, number: int) -> Worker:
        """Ask for worker `number`. Raises OSError when the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.socket, [COMMAND.pack(b"F", number)], [theirs.fileno()])
        ours.setblocking(False)
        return Worker(number=number, socket=ours)

    def command(self, command: bytes, number: int) -> None:
        """`K`: kill a worker; `S`: let others go before it. Nothing happens when it, or the nursery, has ended."""
        try:
            self.socket.sendall(COMMAND.pack(command, number))
        except OSError:
            return

    def end(self) -> None:
        """End and reap the process, which ends and reaps its workers first."""
        self.socket.close()
        if not self.is_ready:
            self._process.kill()  # it has no workers, and may hang in an import
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its workers die with it
            self._process.wait()

    def _how_it_ended(self) -> str:
        try:
            return f"ended at start with exit code {self._process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return "closed its socket at start and did not end"


@dataclass(eq=False, slots=True)
class Worker:
    """One forked process and the jobs that it was sent, the running one first."""

    number: int
    socket: socket.socket
    pid: int | None = None
    """None until the nursery has told."""
    jobs: deque[Any] = field(default_factory=deque[Any])
    head_since: float = 0.0
    """When the first job began (monotonic seconds)."""
    look_at: float = 0.0
    """The earliest time to look at what it uses (monotonic seconds)."""
    is_slow: bool = False
    """It has one job that takes long, others go before it, and it gets no ordinary ones."""
    cpu_s: float = 0.0
    """Processor seconds of the jobs that it has answered."""
    out: bytearray = field(default_factory=bytearray)
    _received: bytearray = field(default_factory=bytearray)

    def flush(self) -> bool:
        """Send what can be sent; False when the process has ended."""
        try:
            while self.out:
                del self.out[: self.socket.send(self.out)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The replies that have come whole, and whether the process is there still."""
        alive = True
        try:
            piece = self.socket.recv(1 << 18)
            alive = bool(piece)
            self._received += piece
        except BlockingIOError:
            return [], True
        except OSError:
            alive = False
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        return [json.loads(line) for line in lines], alive

    def has_used_up(self, limit_s: float, now: float, most_s: float) -> bool:
        """Whether the running job has had its time: processor seconds while it computes, else wall time."""
        waited = now - self.head_since
        if waited < limit_s:
            return False
        if waited >= most_s or self.pid is None:
            return waited >= most_s
        try:
            process = psutil.Process(self.pid)
            if process.status() != psutil.STATUS_RUNNING:
                return True
            times = process.cpu_times()
        except psutil.Error:
            return True
        return times.user + times.system - self.cpu_s >= limit_s

    def close(self) -> None:
        """Forget the process; its end is the nursery's business."""
        self.socket.close()
