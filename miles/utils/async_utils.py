"""Awaiting several things at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; when one job raises, the others are cancelled and awaited before its error goes on."""
    first: BaseException | None = None
    running: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        first = _first(errors)
    if first is not None:
        raise first
    return [task.result() for task in running]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
