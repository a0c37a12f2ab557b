"""Worker processes with a time limit per job: one that takes longer is killed, by process id, and replaced."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

from miles.rollout.rm_hub.dispatcher import Dispatcher
from miles.rollout.rm_hub.jobs import Counters, Job, Outcome, as_json
from miles.rollout.rm_hub.nursery import WorkerSettings

__all__ = ["Outcome", "WorkerPool"]


class WorkerPool:
    """Applies the function at import path `function` in at most `size` processes, started when first needed.

    Arguments and results are JSON values; the function must give the same for the same, since a job whose worker dies
    is tried once more. `run` may be awaited from any event loop and `run_blocking` called from any thread, at the same
    time.

    The limit counts from when a worker takes the job: waiting for one does not count, nor does its start. A job that
    computes may use `timeout_s` seconds of processor time, one that waits as many of wall time. While others wait, a
    job keeps its place for `slice_s` seconds, or five times what jobs usually take: then its worker goes on as a slow
    one, behind all others for the processors, and a fresh one takes its place. So there are at most `5 * size`
    workers and one spare.
    """

    def __init__(
        self,
        function: str,
        *,
        size: int,
        timeout_s: float,
        memory_bytes: int = 4 * 1024**3,
        slice_s: float = 0.02,
        start_timeout_s: float = 120.0,
        clean: bool = False,
    ) -> None:
        """`memory_bytes` is the address space of a worker. With `clean`, `function` is `FILE.py:NAME` and the workers
        have neither site packages nor environment."""
        settings = WorkerSettings(function=function, memory_bytes=memory_bytes, clean=clean)
        self._dispatcher = Dispatcher(
            settings, size=size, timeout_s=timeout_s, slice_s=slice_s, start_timeout_s=start_timeout_s
        )

    @property
    def counters(self) -> Counters:
        """What happened since the start."""
        return self._dispatcher.counters

    @property
    def num_timeouts(self) -> int:
        """Jobs that took longer than the limit."""
        return self.counters.timeouts

    @property
    def num_crashes(self) -> int:
        """Jobs that ended their worker twice."""
        return self.counters.crashes

    async def run(self, *args: Any) -> Outcome:
        """Apply the function. Raises HookError when it raised, or when no worker can start."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._dispatcher.submit(Job(as_json(args), future))
        return await future

    def run_blocking(self, *args: Any) -> Outcome:
        """`run` for code without an event loop."""
        future: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        self._dispatcher.submit(Job(as_json(args), future))
        return future.result()

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return self._dispatcher.pids()

    def close(self) -> None:
        """End and reap every process; jobs that still run come out as crashed."""
        self._dispatcher.close()
