"""Waits on other processes and on users' functions: each has a name, an owner and a start, and long ones are shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from miles.errors import StalledError

T = TypeVar("T")
_SHOWN_SUBJECTS = 8
ITSELF = "itself"
"""Owner of what a process does for so long by itself that others want to know its name, such as `loads the model`."""


class Wait:
    """One wait, open inside its `with` block: who is waited for, for what, since when (monotonic seconds).

    `group`, `sample` and `request` say for which prompt it is, `outer` is the wait inside whose block it was opened,
    also by a task that was started there. Opening and closing formats nothing.
    """

    __slots__ = ("_all", "group", "name", "outer", "owner", "request", "sample", "since")

    def __init__(
        self, all: dict[Wait, None], owner: str, name: str, group: int | None, sample: int | None, request: str
    ) -> None:
        self._all = all
        self.owner, self.name = owner, name
        self.group, self.sample, self.request = group, sample, request
        self.since = 0.0
        self.outer: Wait | None = None

    def __enter__(self) -> Wait:
        self.since = time.monotonic()
        outer = _innermost.get()
        self.outer = outer if outer in self._all else None  # a task may outlive the wait it was started in
        _innermost.set(self)
        self._all[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        del self._all[self]
        _innermost.set(self.outer)

    def subject(self) -> str:
        """`group 12 sample 98`, a request's id, or nothing."""
        if self.request:
            return self.request
        parts = [f"{kind} {n}" for kind, n in (("group", self.group), ("sample", self.sample)) if n is not None]
        return " ".join(parts)


_innermost: ContextVar[Wait | None] = ContextVar("innermost_wait", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGroup:
    """The open waits of one owner and name, within one kind of outer wait."""

    owner: str
    name: str
    within: str
    """Owner and name of the outer wait, which is not told by itself while it has inner ones; empty for none."""
    count: int
    since: float
    """When the oldest began (monotonic seconds)."""
    subjects: tuple[str, ...]
    """The first eight subjects, oldest first."""


class OpenWaits:
    """The waits that are open now. Read by other threads: a wait is added and removed in one step of the interpreter."""

    def __init__(self) -> None:
        self._all: dict[Wait, None] = {}

    def on(
        self, owner: str, name: str, *, group: int | None = None, sample: int | None = None, request: str = ""
    ) -> Wait:
        """A wait for `owner` to do `name`, open inside a `with` block."""
        return Wait(self._all, owner, name, group, sample, request)

    def list(self) -> list[Wait]:
        """Oldest first."""
        return list(self._all)

    def grouped(self) -> list[WaitGroup]:
        """By owner and name, oldest first."""
        return grouped(self._all.copy())


def grouped(waits: Iterable[Wait]) -> list[WaitGroup]:
    """The innermost of some waits, given oldest first, by owner, name and outer wait."""
    open_now = dict.fromkeys(waits)
    outer = {wait.outer for wait in open_now}
    found: dict[tuple[str, str, str], list[Wait]] = {}
    for wait in open_now:
        if wait not in outer:
            within = f"{wait.outer.owner}: {wait.outer.name}" if wait.outer and wait.outer in open_now else ""
            found.setdefault((wait.owner, wait.name, within), []).append(wait)
    return [
        WaitGroup(
            owner=owner,
            name=name,
            within=within,
            count=len(members),
            since=members[0].since,
            subjects=tuple(s for w in members[:_SHOWN_SUBJECTS] if (s := w.subject())),
        )
        for (owner, name, within), members in found.items()
    ]


OPEN = OpenWaits()
"""The open waits of this process."""


class Explainer(Protocol):
    """Looks behind a wait. Both methods may take seconds and are called in a thread."""

    def long_wait(self, owner: str, name: str) -> str:
        """What the chain that begins with this wait ends at, in one line."""
        ...

    def stalled(self, owner: str, name: str) -> str:
        """The whole wait graph, and what the chain that begins with this wait ends at."""
        ...


class Waits:
    """Awaiting other processes, each time under a name and a deadline.

    `report(text)` is called for every wait longer than `report_s` seconds, and again each time as many have passed.
    """

    def __init__(
        self,
        *,
        report_s: float,
        deadline_s: float,
        report: Callable[[str], None],
        explainer: Explainer | None = None,
        open_waits: OpenWaits = OPEN,
    ) -> None:
        self._report_s, self._deadline_s, self._report = report_s, deadline_s, report
        self._explainer, self._open = explainer, open_waits

    async def on(self, owner: str, name: str, what: Awaitable[T], *, deadline_s: float | None = None) -> T:
        """Await `what`, done by `owner`.

        Raises StalledError, and cancels `what`, when it takes longer than `deadline_s` seconds (default: the run's).
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        with self._open.on(owner, name) as wait:
            task = asyncio.ensure_future(what)
            try:
                next_report = self._report_s
                while True:
                    waited = time.monotonic() - wait.since
                    done, _ = await asyncio.wait({task}, timeout=max(min(next_report, deadline_s) - waited, 0.0))
                    if done:
                        return task.result()
                    waited = time.monotonic() - wait.since
                    if waited >= deadline_s:
                        raise await self._stalled(owner, name, waited, deadline_s)
                    if waited >= next_report:
                        next_report = waited + self._report_s
                        await self._tell(owner, name, waited)
            finally:
                task.add_done_callback(_forget)  # also of one that fails as this wait is cancelled
                task.cancel()

    async def _tell(self, owner: str, name: str, waited: float) -> None:
        text = f"  waiting for {owner}: {name}, {waited:.0f} s so far"
        if self._explainer is not None:
            text += f"; {await asyncio.to_thread(self._explainer.long_wait, owner, name)}"
        self._report(text)

    async def _stalled(self, owner: str, name: str, waited: float, deadline_s: float) -> StalledError:
        text = f"waited {waited:.0f} s for {owner}: {name}; the limit is {deadline_s:.0f} s\n"
        if self._explainer is not None:
            text += f"{await asyncio.to_thread(self._explainer.stalled, owner, name)}\n"
        return StalledError(
            f"{text}    fix: look into that process's log in the run folder; raise cluster.wait_timeout_s if it was only slow"
        )


def _forget(task: asyncio.Future[Any]) -> None:
    """Take note of how something ended that nobody may wait for any more, or asyncio reports it as never looked at."""
    if not task.cancelled():
        task.exception()
