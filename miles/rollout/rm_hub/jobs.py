"""A job of the worker pool, what became of it, and how the one who waits for it is told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from miles.errors import MilesError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job. `value` is None when the worker was killed or died."""

    value: Any = None
    timed_out: bool = False
    crashed: bool = False
    """The job ended its worker twice, or the pool was closed."""


@dataclass(eq=False, slots=True)
class Job:
    """One call: its arguments as JSON, and the future that awaits it."""

    args: str
    future: asyncio.Future[Outcome] | concurrent.futures.Future[Outcome]
    attempts: int = 0
    number: int = 0


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    timeouts: int = 0
    crashes: int = 0
    slowed: int = 0
    """Jobs that others were let past."""
    restarts: int = 0
    """Slow jobs that were ended to begin anew."""
    cpu_s: float = 0.0
    """Processor seconds of the workers' jobs, those that were killed included."""


class Results:
    """Results on their way from the dispatcher's thread to whoever awaits them; each event loop is told all at once."""

    def __init__(self) -> None:
        self._settled: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Outcome], Outcome | MilesError]]] = {}

    def settle(self, job: Job, result: Outcome | MilesError) -> None:
        """Note the end of a job; one that is awaited in an event loop learns it with `tell`."""
        if isinstance(job.future, asyncio.Future):
            self._settled.setdefault(job.future.get_loop(), []).append((job.future, result))
        elif job.future.set_running_or_notify_cancel():
            _set(job.future, result)

    def tell(self) -> None:
        """Hand each event loop its results."""
        for loop, results in self._settled.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed, nobody waits
                loop.call_soon_threadsafe(_set_all, results)
        self._settled = {}


def _set_all(results: list[tuple[asyncio.Future[Outcome], Outcome | MilesError]]) -> None:
    for future, result in results:
        if not future.done():
            _set(future, result)


def _set(future: Any, result: Outcome | MilesError) -> None:
    if isinstance(result, Outcome):
        future.set_result(result)
    else:
        future.set_exception(result)


def next_job(queue: deque[Job]) -> Job | None:
    """The first job that somebody still waits for, taken out."""
    while queue:
        job = queue.popleft()
        if not job.future.cancelled():
            return job
    return None


def as_json(args: tuple[Any, ...]) -> str:
    """Arguments as one line of JSON. Raises TypeError or ValueError for what JSON cannot hold."""
    return json.dumps(args)
