"""Where the tasks of an event loop wait, as text: what the stacks of threads cannot show."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from typing import Any

LOOPS = weakref.WeakSet[asyncio.AbstractEventLoop]()
"""Event loops of this process beside the one that its heartbeat watches."""
_MOST_STACKS = 40
_MOST_FRAMES = 30


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """The stacks of all tasks of `loop`, innermost frame first, equal ones once. May be called in any thread."""
    found: Counter[tuple[str, ...]] = Counter()
    names: dict[tuple[str, ...], str] = {}
    for task in asyncio.all_tasks(loop):
        stack = _stack(task.get_coro())
        found[stack] += 1
        names.setdefault(stack, task.get_name())
    pieces: list[str] = []
    for stack, count in found.most_common(_MOST_STACKS):
        others = f" and {count - 1} more like it" if count > 1 else ""
        pieces.append("\n".join([f"Task {names[stack]!r}{others} (innermost first):", *stack]))
    if len(found) > _MOST_STACKS:
        pieces.append(f"+ {len(found) - _MOST_STACKS} other stacks")
    return "\n\n".join(pieces) or "no asyncio task"


def _stack(awaitable: Any) -> tuple[str, ...]:
    """Follow what a coroutine awaits down to where it waits."""
    lines: list[str] = []
    while awaitable is not None and len(lines) < _MOST_FRAMES:
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(awaitable, f"{k}_frame")), None)
        frame = getattr(awaitable, f"{kind}_frame", None)
        if frame is None:  # a future, or a coroutine that has ended meanwhile
            break
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        awaitable = getattr(awaitable, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return tuple(reversed(lines))
