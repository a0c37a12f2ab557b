"""A worker that runs programs a model wrote, each in a process of its own. Standard library only.

```
worker --> keeper --> first process of a pid namespace --> program      with `pid`
worker --> keeper ---------------------------------------> program      without
```
The worker waits for: output, the status of the program, or the next look at the clock. Ending the keeper ends the
namespace and all that is in it; without one, the group and every descendant are ended.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import code_isolation
import code_program

sys.path.pop(0)

_WALL_FACTOR = 5.0
_LOOK_S = 0.05
_END_S = 5.0
_MOST_DESCRIPTORS = 256
_SHUT_IN = b"r"
_BLOCK = 1 << 16
_USUAL = (
    "array bisect collections contextlib copy dataclasses datetime decimal enum fractions functools heapq io itertools "
    "json math operator queue random re statistics string struct textwrap time typing"
)

_isolation: code_isolation.Isolation | None = None


def warm_up() -> None:
    """Import what programs usually import, once for all workers."""
    for name in _USUAL.split():
        __import__(name)
    gc.collect()


def run(source: str, stdin: str, ask: dict[str, Any] | None, limits: dict[str, Any]) -> dict[str, Any]:
    """Run one program once.

    `limits`: `time_s` (processor time, and wall time of a program that waits), `memory_bytes`, `output_bytes`,
    `file_bytes`, `open_files`, `processes`, and for the worker `level` and `root` (see `Isolation`).

    Returns `end`: `exit`, `signal`, `time`, `output`, `processes`, or `sandbox` for a program that could not be shut in; `code`: the exit status or the signal; `seconds`
    of wall time; `stdout`, `stderr` and `report` as text; `holds`: the protections.
    """
    global _isolation
    if _isolation is None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_DESCRIPTORS, hard))  # closing all of them must be quick
        _isolation = code_isolation.Isolation(limits["level"], limits["file_bytes"], limits["root"])
    folder = _isolation.make_folder()
    try:
        execution = _Execution(_isolation, limits)
        execution.start(source, stdin, ask, folder)
        return execution.watch()
    finally:
        _isolation.remove_folder(folder)


@dataclass
class _Execution:
    """One run of one program."""

    isolation: code_isolation.Isolation
    limits: dict[str, Any]
    pid: int = 0
    """The keeper: it starts the program and lives as long."""
    started: float = 0.0
    streams: dict[int, str] = field(default_factory=dict[int, str])
    """Descriptor -> what is read there."""
    found: dict[str, bytearray] = field(default_factory=dict[str, bytearray])

    def start(self, source: str, stdin: str, ask: dict[str, Any] | None, folder: str) -> None:
        given = _file_with(stdin.encode("utf-8", "surrogatepass"), folder)
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "status", "report")}
        self.started = time.monotonic()
        worker = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _die_with(worker)
            ends = {name: pipe[1] for name, pipe in pipes.items()}
            self._keep(ends["status"], lambda: self._become_program(given, ends, source, ask, folder))
        os.close(given)
        for name, (ours, theirs) in pipes.items():
            os.close(theirs)
            os.set_blocking(ours, False)
            self.streams[ours] = name
            self.found[name] = bytearray()

    # -- in the children

    def _keep(self, status: int, become_program: Callable[[], NoReturn]) -> NoReturn:
        """The keeper: start the program, in a namespace of its own where that can be, and end after it."""
        code = 1
        try:
            if "pid" in self.isolation.holds:
                self.isolation.enter_pid_namespace()
                first = os.fork()
                if first:
                    _close_all_but(status)
                    os.waitpid(first, 0)
                    os._exit(0)
                _die_with(None)
            program = os.fork()
            if program == 0:
                become_program()
            _close_all_but(status)
            pid, ended = 0, 0
            while pid != program:
                pid, ended = os.wait()
            os.write(status, b"%d\n" % ended)
            code = 0
        finally:
            os._exit(code)

    def _become_program(
        self, given: int, ends: dict[str, int], source: str, ask: dict[str, Any] | None, folder: str
    ) -> NoReturn:
        try:
            keeper = os.getppid()
            os.setsid()
            for descriptor, place in ((given, 0), (ends["stdout"], 1), (ends["stderr"], 2)):
                os.dup2(descriptor, place)
            if ask is not None:
                ends["status"] = os.dup(ends["status"])  # it may be what 3 is
                os.dup2(ends["report"], 3)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            self.isolation.give_up_rights(self.limits, lambda: _die_with(keeper))
            os.write(ends["status"], _SHUT_IN)
            os.closerange(3 if ask is None else 4, _most_descriptors())
        except BaseException as error:  # noqa: BLE001 - a program without its limits must not start
            os.write(2, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        code_program.run(source, ask, None if ask is None else 3, folder)
        raise AssertionError

    # -- in the worker

    def watch(self) -> dict[str, Any]:
        """Read until the program has ended, or end it."""
        end = self._read_until_over()
        self._end_all()
        self._read_rest()
        for descriptor in self.streams:
            os.close(descriptor)
        code: int | None = None
        if end is None:
            end, code = self._status()
        texts = {name: self.found[name].decode("utf-8", "replace") for name in ("stdout", "stderr", "report")}
        seconds = time.monotonic() - self.started
        return {"end": end, "code": code, "seconds": seconds, "holds": sorted(self.isolation.holds), **texts}

    def _read_until_over(self) -> str | None:
        """Why the program has to be ended; None when it ended by itself."""
        poll = select.poll()
        for descriptor in self.streams:
            poll.register(descriptor, select.POLLIN)
        open_streams = set(self.streams)
        status = next(descriptor for descriptor, name in self.streams.items() if name == "status")
        next_look = self.started + min(self.limits["time_s"], 2 * _LOOK_S)
        while True:
            for descriptor, _ in poll.poll(max(0.0, next_look - time.monotonic()) * 1000 + 1):
                if not self._read(descriptor):
                    poll.unregister(descriptor)
                    open_streams.discard(descriptor)
            if self._too_much():
                return "output"
            if b"\n" in self.found["status"] or status not in open_streams:
                return None
            if time.monotonic() >= next_look:
                if (why := self._look()) is not None:
                    return why
                next_look = time.monotonic() + _LOOK_S

    def _read(self, descriptor: int) -> bool:
        """Take what is there; False at the end."""
        try:
            block = os.read(descriptor, _BLOCK)
        except BlockingIOError:
            return True
        self.found[self.streams[descriptor]] += block
        return bool(block)

    def _too_much(self) -> bool:
        return sum(len(self.found[name]) for name in ("stdout", "stderr", "report")) > self.limits["output_bytes"]

    def _look(self) -> str | None:
        """Whether it has used up its time, or started too many processes."""
        waited = time.monotonic() - self.started
        family = _descendants(self.pid)
        if len(family) > self.limits["processes"] + 3:
            return "processes"
        limit_s = self.limits["time_s"]
        if waited < limit_s:
            return None
        cpu_s = sum(seconds for seconds, _ in family.values())
        computes = any(state == "R" for _, state in family.values())
        return "time" if waited >= _WALL_FACTOR * limit_s or cpu_s >= limit_s or not computes else None

    def _end_all(self) -> None:
        """End the program and everything that it started; returns when they are gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                for child in _descendants(os.getpid(), itself=False):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
                time.sleep(0.0005)
        os._exit(1)  # this worker cannot vouch for what is left; the nursery's end will end it

    def _read_rest(self) -> None:
        for descriptor in self.streams:
            while not self._too_much():
                before = len(self.found[self.streams[descriptor]])
                if not self._read(descriptor) or len(self.found[self.streams[descriptor]]) == before:
                    break

    def _status(self) -> tuple[str, int]:
        """How the program ended by itself."""
        started, _, text = self.found["status"].partition(_SHUT_IN)
        if started or (not text and not self.found["status"].startswith(_SHUT_IN)):
            return "sandbox", 1
        status = int(text) if text else signal.SIGKILL
        if os.WIFSIGNALED(status):
            ended = os.WTERMSIG(status)
            return ("time" if ended == signal.SIGXCPU else "signal"), ended
        return "exit", os.waitstatus_to_exitcode(status)


def _die_with(parent: int | None) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _file_with(data: bytes, folder: str) -> int:
    """A descriptor from which `data` can be read."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("stdin")
    else:
        path = os.path.join(folder, "stdin")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.unlink(path)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _close_all_but(kept: int) -> None:
    os.closerange(0, kept)
    os.closerange(kept + 1, _most_descriptors())


def _most_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _descendants(root: int, *, itself: bool = True) -> dict[int, tuple[float, str]]:
    """Process id -> (processor seconds, state) of a process and all below it; empty where that cannot be known."""
    ticks = os.sysconf("SC_CLK_TCK")
    found: dict[int, tuple[float, str]] = {}
    children: dict[int, list[int]] = collections.defaultdict(list)
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        values = file.read().rpartition(b") ")[2].split()
                    state, times = values[0].decode(), sum(int(value) for value in values[11:15])
                    found[int(entry)] = (times / ticks, state)
                    children[int(values[1])].append(int(entry))
    family: dict[int, tuple[float, str]] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid in found and (itself or pid != root):
            family[pid] = found[pid]
        waiting += children[pid]
    return family
