"""Worker processes with a time limit per job: one that takes longer is killed, by process id, and replaced."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.errors import HookError

logger = logging.getLogger(__name__)

_WORKER_FILE = Path(__file__).with_name("worker.py")
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job. `value` is None when the worker was killed or died."""

    value: Any = None
    timed_out: bool = False
    crashed: bool = False
    """The job ended its worker twice, or went past its memory."""


class WorkerPool:
    """Applies the function at import path `function` in at most `size` processes, started when first needed.

    Arguments and results are JSON values. `run` may be awaited from any event loop and `run_blocking` called from any
    thread, at the same time. The limit counts from when a worker takes the job: waiting for one does not count, nor
    does its start.

    Workers are plain subprocesses, not `multiprocessing` ones, so the owner's `__main__` is not imported again.
    """

    def __init__(
        self,
        function: str,
        *,
        size: int,
        timeout_s: float,
        memory_bytes: int = 4 * 1024**3,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.function, self.size, self.timeout_s = function, size, timeout_s
        self.memory_bytes, self.start_timeout_s = memory_bytes, start_timeout_s
        self.num_timeouts = 0
        self.num_crashes = 0
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._closed = False
        self._threads = concurrent.futures.ThreadPoolExecutor(size, thread_name_prefix="reward-worker")

    async def run(self, *args: Any) -> Outcome:
        """Apply the function. Raises HookError when it raised, or when no worker can start."""
        return await asyncio.wrap_future(self._threads.submit(self._attempt, args))

    def run_blocking(self, *args: Any) -> Outcome:
        """`run` for code without an event loop."""
        return self._threads.submit(self._attempt, args).result()

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        with self._lock:
            return [worker.pid for worker in [*self._idle, *self._busy]]

    def close(self) -> None:
        """End and reap every worker; jobs that still run come out as crashed."""
        with self._lock:
            self._closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _attempt(self, args: tuple[Any, ...]) -> Outcome:
        """A job whose worker dies is tried once more: something else may have ended the process."""
        for attempt in range(_ATTEMPTS):
            worker = self._take()
            try:
                reply = worker.ask(args, self.timeout_s)
            except TimeoutError:
                self._discard(worker)
                with self._lock:
                    self.num_timeouts += 1
                logger.warning("%s took longer than %g s; its worker was killed", self.function, self.timeout_s)
                return Outcome(timed_out=True)
            except EOFError:
                self._discard(worker)
                if self._closed or attempt + 1 == _ATTEMPTS:
                    break
                continue
            except BaseException:
                self._discard(worker)
                raise
            self._put_back(worker)
            if "raised" in reply:
                raise HookError(self.function, f"raised {reply['raised']}")
            return Outcome(value=reply["value"])
        with self._lock:
            self.num_crashes += 1
        logger.warning("%s ended its worker process %d times on the same job", self.function, _ATTEMPTS)
        return Outcome(crashed=True)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise HookError(self.function, "was called after the run's rewards were closed")
            worker = self._idle.pop() if self._idle else None
            if worker is not None:
                self._busy.add(worker)
                return worker
        worker = _Worker(self.function, self.memory_bytes)
        with self._lock:
            self._busy.add(worker)
            closed = self._closed
        try:
            if closed:
                raise HookError(self.function, "was called after the run's rewards were closed")
            worker.wait_until_ready(self.start_timeout_s)
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _put_back(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            if not self._closed:
                self._idle.append(worker)
                return
        worker.kill()

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
        worker.kill()


class _Worker:
    """One process. Used by one thread at a time; `kill` may come from any."""

    def __init__(self, function: str, memory_bytes: int) -> None:
        self.function = function
        self._buffer = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER_FILE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._kill_lock = threading.Lock()
        self._greeting = {"sys_path": sys.path, "function": function, "memory_bytes": memory_bytes}

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises HookError when the function cannot be imported there or the process does not start in time."""
        deadline = time.monotonic() + timeout_s
        try:
            self._write(self._greeting, deadline)
            reply = self._read(deadline)
        except TimeoutError:
            raise HookError(self.function, f"its worker process was not ready within {timeout_s:g} s") from None
        except EOFError:
            raise HookError(self.function, f"its worker process {self._end(deadline)}") from None
        if "failed" in reply:
            raise HookError(
                self.function, f"cannot be imported in a worker process: {reply['failed']}", "install what is missing"
            )

    def ask(self, args: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
        """The reply to one job. Raises TimeoutError, or EOFError when the process died."""
        deadline = time.monotonic() + timeout_s
        self._write({"args": args, "limit_s": timeout_s}, deadline)
        return self._read(deadline)

    def kill(self) -> None:
        """End and reap the process; a second call does nothing."""
        with self._kill_lock:
            if self._process.returncode is None:
                self._process.kill()
                self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()

    def _end(self, deadline: float) -> str:
        """How a process that closed its output at start ended, in words."""
        try:
            return f"ended at start with exit code {self._process.wait(max(deadline - time.monotonic(), 0))}"
        except subprocess.TimeoutExpired:
            return "closed its output at start and did not end"

    def _write(self, message: dict[str, Any], deadline: float) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        view = memoryview(json.dumps(message).encode() + b"\n")
        try:
            descriptor = stdin.fileno()
            os.set_blocking(descriptor, False)
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            while view:
                left = deadline - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    raise TimeoutError
                view = view[os.write(descriptor, view) :]
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise EOFError from None

    def _read(self, deadline: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            descriptor = stdout.fileno()
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while (end := self._buffer.find(b"\n")) < 0:
                left = deadline - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    raise TimeoutError
                block = os.read(descriptor, 1 << 16)
                if not block:
                    raise EOFError
                self._buffer += block
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise EOFError from None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return json.loads(line)
