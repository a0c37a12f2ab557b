"""Waits on other processes: each has a name, an owner and a deadline, and long ones are shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from miles.errors import StalledError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Who is waited for, for what, since when (monotonic seconds)."""

    name: str
    owner: str
    since: float


class Waits:
    """All waits of this process.

    `report(text)` is called for every wait longer than `report_s` seconds, and again each time as many have passed.
    """

    def __init__(self, *, report_s: float, deadline_s: float, report: Callable[[str], None]) -> None:
        self._report_s, self._deadline_s, self._report = report_s, deadline_s, report
        self._open: dict[int, Wait] = {}
        self._next = 0

    def open(self) -> list[Wait]:
        """Waits that go on now, oldest first."""
        return sorted(self._open.values(), key=lambda w: w.since)

    def describe(self) -> str:
        """Who is waited for, for what and since when, one line a wait."""
        now = time.monotonic()
        lines = [f"  waiting for {w.owner}: {w.name}, {now - w.since:.0f} s so far" for w in self.open()]
        return "\n".join(lines) or "  waiting for no other process"

    @contextmanager
    def _named(self, name: str, owner: str) -> Iterator[Wait]:
        key, self._next = self._next, self._next + 1
        self._open[key] = wait = Wait(name, owner, time.monotonic())
        try:
            yield wait
        finally:
            del self._open[key]

    async def on(self, owner: str, name: str, what: Awaitable[T], *, deadline_s: float | None = None) -> T:
        """Await `what`, done by `owner`.

        Raises StalledError, and cancels `what`, when it takes longer than `deadline_s` seconds (default: the run's).
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        task = asyncio.ensure_future(what)
        with self._named(name, owner) as wait:
            try:
                while True:
                    left = deadline_s - (time.monotonic() - wait.since)
                    done, _ = await asyncio.wait({task}, timeout=max(min(self._report_s, left), 0.0))
                    if done:
                        return task.result()
                    waited = time.monotonic() - wait.since
                    if waited >= deadline_s:
                        raise StalledError(
                            f"waited {waited:.0f} s for {owner}: {name}; the limit is {deadline_s:.0f} s\n"
                            "    fix: look into that process's log in the run folder; raise cluster.wait_timeout_s if it was only slow"
                        )
                    self._report(f"  waiting for {owner}: {name}, {waited:.0f} s so far")
            finally:
                if not task.done():
                    task.add_done_callback(_forget)
                    task.cancel()


def _forget(task: asyncio.Future[Any]) -> None:
    """Take note of how something given up ended, so that asyncio does not report it as never looked at."""
    if not task.cancelled():
        task.exception()
