"""The wait graph of a run: who waits for whom, since when, for which prompts, and what the chain probably ends at."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from miles.utils.heartbeat import BEAT_S
from miles.utils.waits import ITSELF

DRIVER = "driver"
QUEUE = "samples in flight"
"""Owner of the waits of samples whose turn has not come: a consequence of other waits, never the cause."""
MOST_LINES = 40
SILENT_S = 10 * BEAT_S
"""Age of the last heartbeat after which a process is called silent."""
_MOST_WAITS = 8
_MOST_PROCESSES = 8
_MOST_SUBJECTS = 4
QUIET_S = 60.0
"""Seconds without a new line in its log after which a process that works by itself is told with the end of that log."""
_QUIET_LINES = 5
_MOST_LETTERS = 200
_LOG_END_BYTES = 1 << 16
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STATES = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting for a disk",
    psutil.STATUS_ZOMBIE: "ended, its owner has not noticed",
    psutil.STATUS_DEAD: "gone",
}
_GONE = frozenset({"gone", _STATES[psutil.STATUS_ZOMBIE]})
_NOT_ALIVE = _GONE | {"stopped", "stopped by a debugger"}


def process_state(pid: int) -> str:
    """`running`, `sleeping`, `stopped`, `gone` and the like."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "not readable"
    return _STATES.get(status, str(status))


@dataclass(slots=True, kw_only=True)
class ProcessNode:
    """A process and what it waits for. `heartbeat_s` is the age of its last heartbeat, None for one that has none."""

    role: str
    pid: int
    state: str
    heartbeat_s: float | None
    loop_stuck_s: float | None
    """Seconds for which its event loop has not answered."""
    blocks: bool
    """Whether it works in the thread of its event loop, so that stuck means busy."""
    at: list[str]
    """Where that thread is, innermost first."""
    waits: list[WaitNode] = field(default_factory=list)
    shown_above: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.state in _GONE

    @property
    def answers(self) -> bool:
        """Whether it can answer the signal for its stacks."""
        return self.heartbeat_s is not None and self.state not in _NOT_ALIVE

    @property
    def trouble(self) -> str:
        """What is wrong with the process itself; empty when nothing is."""
        if self.state in _NOT_ALIVE:
            return self.state
        if self.heartbeat_s is not None and self.heartbeat_s > SILENT_S:
            return (
                f"silent for {self.heartbeat_s:.0f} s though {self.state}: in native code that keeps the interpreter"
            )
        if self.loop_stuck_s is not None and not self.blocks:
            return f"event loop stuck for {self.loop_stuck_s:.0f} s{_where(self.at)}"
        return ""

    def describe(self) -> str:
        """One line, without waits."""
        parts = [f"pid {self.pid}", self.state]
        if self.heartbeat_s is not None:
            parts.append(f"heartbeat {self.heartbeat_s:.0f} s ago")
        text = f"{self.role} ({', '.join(parts)})"
        if self.loop_stuck_s is not None:
            what = "busy" if self.blocks else "event loop stuck"
            text += f": {what} for {self.loop_stuck_s:.0f} s{_where(self.at)}"
        return text


@dataclass(slots=True, kw_only=True)
class WaitNode:
    """Waits of one process for one owner and purpose, and the processes behind that owner."""

    owner: str
    name: str
    count: int
    age_s: float
    """Age of the oldest."""
    subjects: list[str]
    within: str
    """Owner and name of the wait that this one is a part of; empty for none."""
    on: list[ProcessNode] = field(default_factory=list)

    def describe(self) -> str:
        """One line, without the processes."""
        if self.owner == ITSELF:
            return f"{self.name}, {self.age_s:.0f} s so far"
        times = f", {self.count} times" if self.count > 1 else ""
        text = f"waits {self.age_s:.0f} s for {self.owner}: {self.name}{times}"
        if self.subjects:
            more = self.count - len(self.subjects[:_MOST_SUBJECTS])
            text += f" [{', '.join(self.subjects[:_MOST_SUBJECTS])}{f', + {more} more' if more > 0 else ''}]"
        return f"{text}, within {self.within}" if self.within else text


def build(
    beats: Sequence[Mapping[str, Any]], now: float, state_of: Callable[[int], str] = process_state
) -> ProcessNode | None:
    """The graph below the driver, from the last beat of each process; None when the driver's is missing.

    `now` is of the same clock as the beats, `time.monotonic()` of this machine. Processes without a beat of their own
    are known from their owner's.
    """
    by_role = {beat["role"]: beat for beat in beats}
    pids = {name: pid for beat in beats for name, pid in beat["children"].items()}
    pids |= {role: beat["pid"] for role, beat in by_role.items() if role not in pids}
    seen: set[str] = set()

    def process(role: str) -> ProcessNode:
        beat = by_role.get(role)
        if beat is not None and beat["pid"] != pids[role]:
            beat = None  # of a process that this one has replaced
        node = ProcessNode(
            role=role,
            pid=pids[role],
            state=state_of(pids[role]),
            heartbeat_s=None if beat is None else max(0.0, now - beat["written"]),
            loop_stuck_s=None,
            blocks=bool(beat and beat["blocks"]),
            at=[],
            shown_above=role in seen,
        )
        if beat is None or role in seen:
            return node
        seen.add(role)
        if beat["loop_stuck_s"] is not None:
            node.loop_stuck_s, node.at = beat["loop_stuck_s"] + (now - beat["written"]), list(beat["at"])
        node.waits = [wait(w) for w in sorted(beat["waits"], key=lambda w: (w["owner"] == QUEUE, w["since"]))]
        return node

    def wait(entry: Mapping[str, Any]) -> WaitNode:
        return WaitNode(
            owner=entry["owner"],
            name=entry["name"],
            count=entry["count"],
            age_s=max(0.0, now - entry["since"]),
            subjects=list(entry["subjects"]),
            within=entry["within"],
            on=[process(role) for role in roles_of(entry["owner"], pids)],
        )

    return process(DRIVER) if DRIVER in by_role else None


def roles_of(owner: str, roles: Mapping[str, Any]) -> list[str]:
    """The processes behind an owner: `rollout manager` is one, `engines` are all of them, `trainer` every rank."""
    exact = owner.replace(" ", "-")
    if exact in roles:
        return [exact]
    numbered = re.compile(re.escape(exact.removesuffix("s")) + r"-(\d+)")
    found = [(int(match[1]), role) for role in roles if (match := numbered.fullmatch(role))]
    return [role for _, role in sorted(found)]


@dataclass(frozen=True, slots=True)
class Culprit:
    """Where the longest chain of waits ends: what is found there, and the processes on the chain and beside it."""

    text: str
    involved: tuple[ProcessNode, ...]
    """Driver first; of several processes behind one owner, all."""
    works: str = ""
    """Role of the process that the chain ends at when that is at work of its own, which its log tells more of."""


def culprit(driver: ProcessNode, owner: str = "", name: str = "") -> Culprit:
    """Follow the oldest wait of each process until one that is in trouble, or waits for no other process.

    A wait behind which some process is in trouble goes before older ones, and in the driver the wait for `owner` to do
    `name`, if it has that one.
    """
    node, waited, top_s = driver, "", 0.0
    involved = [driver]
    while not node.trouble and node.waits:
        asked = f"{owner}: {name}"
        first = [w for w in node.waits if node is driver and asked in (f"{w.owner}: {w.name}", w.within)]
        candidates = [*first, *node.waits]
        oldest = next((w for w in candidates if _leads_to_trouble(w)), candidates[0])
        top_s = max(top_s, oldest.age_s)
        waited = oldest.describe().removeprefix("waits ")
        fresh = [p for p in oldest.on if not p.shown_above]
        if oldest.owner == ITSELF:
            return Culprit(f"{node.role} (pid {node.pid}) {waited}", tuple(involved), node.role)
        if not fresh:
            text = f"{node.role} waits {waited}"
            if oldest.age_s < top_s / 2:
                text = f"nothing that is old by itself, so work goes on or is started again; the oldest: {text}"
            return Culprit(text, tuple(involved))
        fresh.sort(key=_suspicion, reverse=True)
        involved += fresh
        node = fresh[0]
    text = _in_trouble(node, waited) if node.trouble else _at_the_end(node, waited)
    return Culprit(text, tuple(involved))


def _leads_to_trouble(wait: WaitNode) -> bool:
    return any(node.trouble or any(map(_leads_to_trouble, node.waits)) for node in wait.on)


def _suspicion(node: ProcessNode) -> tuple[bool, float]:
    oldest = max((wait.age_s for wait in node.waits), default=0.0)
    in_trouble = bool(node.trouble) or any(map(_leads_to_trouble, node.waits))
    return in_trouble, max(oldest, node.loop_stuck_s or 0.0)


def _in_trouble(node: ProcessNode, waited: str) -> str:
    text = f"{node.role} (pid {node.pid}) is {node.trouble}"
    if node.trouble.startswith("event loop"):
        text = f"{node.role} (pid {node.pid}): {node.trouble}"
    if node.state == "stopped":
        text += f" by a signal; kill -CONT {node.pid} lets it go on"
    return f"{text} (waited {waited})" if waited else text


def _at_the_end(node: ProcessNode, waited: str) -> str:
    if node.loop_stuck_s is not None:
        return f"{node.describe()} (waited {waited})"
    if not waited:
        return f"{node.role} waits for no other process"
    return f"{node.role} (pid {node.pid}), {node.state}, itself waits for nothing that has a name (waited {waited})"


def last_words(logs_dir: Path, role: str) -> str:
    """The last line of a process's log and its age; of a log that has long been quiet the last lines. Empty without a log."""
    path = logs_dir / f"{role}.log"
    lines = log_lines(path, _QUIET_LINES)
    try:
        quiet_s = time.time() - path.stat().st_mtime
    except OSError:
        return ""
    if not lines:
        return f"; its log ({path}) is empty"
    if quiet_s < QUIET_S:
        return f"; its log, {max(0.0, quiet_s):.0f} s ago: {lines[-1]}"
    return "\n      ".join([f"; its log has said nothing for {quiet_s:.0f} s and ends:", *lines])


def log_lines(path: Path, most: int) -> list[str]:
    """The last lines of a log that say something: with letters, without colours, of a progress bar its last state."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_END_BYTES))
            end = log.read().decode(errors="replace")
    except OSError:
        return []
    found: list[str] = []
    for line in reversed(end.split("\n")):
        text = _ESCAPES.sub("", line).rstrip().rpartition("\r")[2].strip()
        if any(map(str.isalpha, text)) and len(found) < most:
            found.append(text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ...")
    return found[::-1]


def _where(at: Sequence[str]) -> str:
    return f" at {at[0]}" if at else ""


def render(driver: ProcessNode, found: Culprit | None = None) -> str:
    """The graph as an indented tree of at most 40 lines, the last of which names the probable cause."""
    lines = list(_lines(driver, 0))
    if len(lines) > MOST_LINES - 2:
        lines = [*lines[: MOST_LINES - 3], f"  + {len(lines) - MOST_LINES + 3} lines more"]
    return "\n".join(["wait graph:", *lines, f"probably: {(found or culprit(driver)).text}"])


def _lines(node: ProcessNode, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if node.shown_above:
        yield f"{indent}  {node.role}, see above"
        return
    yield f"{indent}  {node.describe()}"
    if not node.waits and depth == 0:
        yield f"{indent}    waits for no other process"
    for wait in node.waits[:_MOST_WAITS]:
        yield f"{indent}    {wait.describe()}"
        shown = sorted(wait.on, key=_suspicion, reverse=True)[:_MOST_PROCESSES] if len(wait.on) > 1 else wait.on
        for process in shown:
            yield from _lines(process, depth + 2)
        if len(wait.on) > len(shown):
            yield f"{indent}      + {len(wait.on) - len(shown)} processes more"
    if len(node.waits) > _MOST_WAITS:
        yield f"{indent}    + {len(node.waits) - _MOST_WAITS} waits more"


def now() -> float:
    """The clock of heartbeats and waits."""
    return time.monotonic()
