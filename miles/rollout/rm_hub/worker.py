"""The process that workers are forked from, and the workers: each applies one function to one job after another.

It is run as a file and imports nothing but the standard library until the owner has said what is where. The first
process, the nursery, loads the function once and forks a worker whenever it is told to, which takes milliseconds. It
reaps and, when told to, kills its workers, so that no process id is ever used after its process is gone. Workers die
with the nursery and the nursery with the owner; a timer ends a worker whose job runs on when nobody kills it.

The nursery's standard input is a socket. The owner sends a greeting, one line of JSON, and gets one back; then both
sides send records (`COMMAND`, `NOTE`). A worker gets its jobs from a socket that comes with the command to fork:
lines of JSON, `[number, limit_s, args]`, each answered with `{"id", "value"}` or `{"id", "raised"}`, and `cpu_s`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

GRACE_S = 5.0
"""Seconds past the longest that a job may take after which the kernel ends a worker; its owner kills it before."""
WALL_FACTOR = 10.0
"""A job that computes may take this many times its limit in wall time, where it has to share the processors."""

COMMAND = struct.Struct("=cQ")
"""From the owner: `F` fork worker n (its socket comes with it), `K` kill worker n, `S` let others go before it."""
NOTE = struct.Struct("=cQq")
"""To the owner: `P` worker n has the process id v, `E` worker n has ended and was reaped, with wait status v."""
_SLOW_NICENESS = 10
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Read the greeting (`sys_path`, `function`, `memory_bytes`), load the function, then serve the owner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    die_with_parent(None)
    greeting = json.loads(_line(control))
    if greeting["sys_path"] is not None:
        sys.path[:] = greeting["sys_path"]
    try:
        function = _load(greeting["function"])
    except Exception as error:  # noqa: BLE001 - told to the owner, who raises it
        control.sendall(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    gc.freeze()  # workers share the memory of what is loaded
    control.sendall(b'{"ready": true}\n')
    jobs = _Nursery(control).serve()
    if jobs is not None:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (greeting["memory_bytes"],) * 2)
        _work(jobs, function)


def die_with_parent(parent: int | None) -> None:
    """End this process when the thread that started it ends, or at once when `parent` has ended already."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)


class _Nursery:
    """Forks, kills and reaps workers as the owner says, until the owner's end of the socket closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: dict[int, int] = {}

    def serve(self) -> socket.socket | None:
        """Returns in each worker, with the socket of its jobs, and never in the nursery."""
        _adopt_orphans()
        woken, wake = os.pipe()
        for descriptor in (woken, wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._control, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self._control in ready:
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
                except OSError:
                    message, descriptors = b"", []
                if len(message) < COMMAND.size:
                    self._end()
                command, number = COMMAND.unpack(message)
                if command == b"F":
                    jobs = self._fork(number, descriptors[0])
                    if jobs is not None:
                        os.close(woken)
                        os.close(wake)
                        return jobs
                elif number in self._workers:
                    self._command(command, self._workers[number])

    def _fork(self, number: int, descriptor: int) -> socket.socket | None:
        nursery = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no memory or no process: the worker's socket closes, and the owner sees that
            os.close(descriptor)
            return self._note(b"E", number, -1)
        if pid == 0:
            die_with_parent(nursery)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            return socket.socket(fileno=descriptor)
        os.close(descriptor)
        self._workers[number] = pid
        return self._note(b"P", number, pid)

    def _command(self, command: bytes, pid: int) -> None:
        with contextlib.suppress(OSError):
            if command == b"K":
                os.kill(pid, signal.SIGKILL)
            else:
                os.setpriority(os.PRIO_PROCESS, pid, _SLOW_NICENESS)

    def _reap(self) -> None:
        for number, pid in list(self._workers.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._workers[number]
                if os.WIFSIGNALED(status):
                    self._end_orphans()
                self._note(b"E", number, status)

    def _note(self, what: bytes, number: int, value: int) -> None:
        with contextlib.suppress(OSError):  # the owner has gone, which the next read tells
            self._control.sendall(NOTE.pack(what, number, value))

    def _end(self) -> NoReturn:
        for pid in self._workers.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._workers.values():
            os.waitpid(pid, 0)
        self._workers.clear()
        self._end_orphans()
        os._exit(0)

    def _end_orphans(self) -> None:
        """End what workers that were ended have left behind: their children are this process's now."""
        while orphans := _children(os.getpid()) - set(self._workers.values()):
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _work(jobs: socket.socket, function: Callable[..., Any]) -> None:
    """Serve jobs until the owner closes its end."""
    before = _cpu_s()
    with jobs.makefile("rb") as lines:
        for line in lines:
            number, limit_s, args = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, limit_s * WALL_FACTOR + GRACE_S)
            try:
                reply = json.dumps({"id": number, "value": function(*args)})[:-1]
            except Exception as error:  # noqa: BLE001 - told to the owner, who raises it
                reply = json.dumps({"id": number, "raised": f"{type(error).__name__}: {error}"})[:-1]
            signal.setitimer(signal.ITIMER_REAL, 0)
            now = _cpu_s()
            try:
                jobs.sendall(f'{reply}, "cpu_s": {now - before:.6f}}}\n'.encode())
            except OSError:  # the owner has gone
                return
            before = now


def _adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children(parent: int) -> set[int]:
    """Process ids of a process's children, those included that nobody has reaped; empty where that is not known."""
    found: set[int] = set()
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                if int(file.read().rpartition(b") ")[2].split()[1]) == parent:
                    found.add(int(entry))
    return found


def _cpu_s() -> float:
    """Processor seconds of this process and of its children that were reaped."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _load(path: str) -> Callable[..., Any]:
    """A function by import path, or as `FILE.py:NAME` without the packages around it.

    A function `warm_up` beside it is called first: what it loads is loaded for all workers.
    """
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        spec = importlib.util.spec_from_file_location("worker_function", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["worker_function"] = module
        spec.loader.exec_module(module)
    else:
        module_name, _, name = path.rpartition(".")
        module = importlib.import_module(module_name)
    getattr(module, "warm_up", lambda: None)()
    return getattr(module, name)


def _line(stream: socket.socket) -> bytes:
    found = bytearray()
    while not found.endswith(b"\n"):
        piece = stream.recv(1)
        if not piece:
            os._exit(0)
        found += piece
    return bytes(found)


if __name__ == "__main__":
    main()
