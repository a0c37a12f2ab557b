"""Which worker gets the next request: least in flight, health, hold and release, waiting in order of arrival."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from miles.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Worker:
    """An engine as the router sees it."""

    url: str
    id: str = ""
    in_flight: int = 0
    healthy: bool = True
    consecutive_failures: int = 0
    failed_checks: int = 0
    """Health checks that failed one after another, whatever requests said between them."""
    last_error: str = ""
    dispatched: int = 0
    last_turn: int = 0

    @property
    def name(self) -> str:
        """URL, with the engine's id where one was given."""
        return f"{self.url} ({self.id})" if self.id else self.url


class NoWorkerError(EngineError):
    """No healthy worker appeared while a request waited."""


class WorkerPool:
    """The workers of one router and the requests that wait for one.

    A request takes a worker at once (`take`) or waits (`wait`) until hold ends, a worker becomes healthy or capacity
    is free; whoever took a worker gives it back. One event loop only.
    """

    def __init__(self, failure_threshold: int, max_connections: int) -> None:
        self.held = False
        self.in_flight = 0
        self._failure_threshold = failure_threshold
        self._max_connections = max_connections
        self._workers: dict[str, Worker] = {}
        self._leaving: dict[str, Worker] = {}
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn = 0

    # ---- membership

    @property
    def workers(self) -> list[Worker]:
        """Workers that are listed, quarantined ones included."""
        return list(self._workers.values())

    def add(self, url: str, worker_id: str = "") -> bool:
        """Add a worker; one that is listed already comes out of quarantine. Returns whether it is new."""
        known = self._workers.get(url)
        worker = known or self._leaving.pop(url, None) or Worker(url)
        worker.id = worker_id or worker.id
        worker.healthy, worker.consecutive_failures, worker.failed_checks, worker.last_error = True, 0, 0, ""
        self._workers[url] = worker
        logger.info("worker %s added; %d listed", worker.name, len(self._workers))
        self._serve_waiting()
        return known is None

    def remove(self, url: str) -> bool:
        """Take a worker off the list; its requests in flight finish. Returns whether it was listed."""
        worker = self._workers.pop(url, None)
        if worker is None:
            return False
        if worker.in_flight:
            self._leaving[url] = worker
        logger.info("worker %s removed with %d requests in flight", worker.name, worker.in_flight)
        return True

    # ---- hold

    def hold(self) -> None:
        """Dispatch nothing from now on; requests wait here."""
        self.held = True

    def release(self) -> None:
        """Dispatch again, in order of arrival."""
        self.held = False
        self._serve_waiting()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight at any worker; False when `timeout_s` passes first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # ---- dispatch

    def take(self, tried: Set[Worker] = frozenset()) -> Worker | None:
        """The healthy worker outside `tried` with the fewest requests in flight, counted as taken; None if there is none.

        Equals take turns, so that a client which sends one request at a time reaches every worker.
        """
        if self.held or self.in_flight >= self._max_connections:
            return None
        best: Worker | None = None
        for worker in self._workers.values():
            if (
                worker.healthy
                and worker not in tried
                and (best is None or (worker.in_flight, worker.last_turn) < (best.in_flight, best.last_turn))
            ):
                best = worker
        if best is None:
            return None
        self._turn += 1
        self.in_flight += 1
        best.in_flight += 1
        best.dispatched += 1
        best.last_turn = self._turn
        self._idle.clear()
        return best

    async def wait(self, patience_s: float) -> Worker:
        """Wait in order of arrival for a worker.

        The wait is as long as it needs while dispatch is held or all healthy workers are full, and ends with
        NoWorkerError once none has been healthy for `patience_s` seconds or more.
        """
        loop = asyncio.get_running_loop()
        place: asyncio.Future[Worker] = loop.create_future()

        def out_of_patience(missed: bool) -> None:
            nonlocal timer
            hopeless = not self.held and not any(worker.healthy for worker in self._workers.values())
            if hopeless and missed and not place.done():
                place.set_exception(NoWorkerError(self.no_worker_text()))
            else:
                timer = loop.call_later(patience_s / 2, out_of_patience, hopeless)

        timer = loop.call_later(patience_s / 2, out_of_patience, False)
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.give_back(place.result())
            raise
        finally:
            timer.cancel()

    def give_back(self, worker: Worker) -> None:
        """End of a request that took `worker`."""
        worker.in_flight -= 1
        self.in_flight -= 1
        if not worker.in_flight and self._leaving.get(worker.url) is worker:
            del self._leaving[worker.url]
        if not self.in_flight:
            self._idle.set()
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting:
            if self._waiting[0].done():  # the client left, or patience ended
                self._waiting.popleft()
                continue
            worker = self.take()
            if worker is None:
                return
            self._waiting.popleft().set_result(worker)

    # ---- health

    def answered(self, worker: Worker) -> None:
        """A request was answered: failures are not in a row any more. Quarantine ends by a health check alone."""
        if worker.healthy:
            worker.consecutive_failures = 0

    def recovered(self, worker: Worker) -> None:
        """A health check was answered: the worker gets requests again at once."""
        worker.consecutive_failures = worker.failed_checks = 0
        if not worker.healthy:
            worker.healthy, worker.last_error = True, ""
            logger.info("worker %s answers again and gets requests", worker.name)
            self._serve_waiting()

    def failed(self, worker: Worker, reason: str, *, check: bool = False) -> None:
        """A health check or connection failed; `failure_threshold` of them in a row put the worker in quarantine."""
        worker.consecutive_failures += 1
        worker.failed_checks += check
        worker.last_error = reason
        if worker.healthy and worker.consecutive_failures >= self._failure_threshold:
            worker.healthy = False
            logger.warning(
                "worker %s gets no more requests until it answers a health check: %d failures in a row, last: %s",
                worker.name,
                worker.consecutive_failures,
                reason,
            )

    # ---- words

    def no_worker_text(self) -> str:
        """Why nothing can be dispatched, and what to do."""
        if not self._workers:
            return (
                "the router has no worker; start an engine and register it with POST /add_worker?url=http://HOST:PORT"
            )
        return (
            f"none of the {len(self._workers)} workers is healthy; see last_error of each, look into the engines' logs, "
            "and restart them: a worker that answers GET /health is used again at once"
        )

    def describe(self) -> list[dict[str, Any]]:
        """One entry per listed worker, then the removed ones that still have requests in flight."""
        return [
            {
                "url": worker.url,
                "id": worker.id,
                "in_flight": worker.in_flight,
                "dispatched": worker.dispatched,
                "healthy": worker.healthy,
                "held": self.held,
                "leaving": leaving,
                "consecutive_failures": worker.consecutive_failures,
                "failed_checks": worker.failed_checks,
                "last_error": worker.last_error,
            }
            for group, leaving in ((self._workers, False), (self._leaving, True))
            for worker in group.values()
        ]

    def state(self) -> dict[str, Any]:
        """Answer of `/list_workers`."""
        return {
            "urls": list(self._workers),
            "workers": self.describe(),
            "held": self.held,
            "in_flight": self.in_flight,
            "waiting": sum(not place.done() for place in self._waiting),
        }
