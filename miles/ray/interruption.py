"""A run that was told to stop: what dies about then has been told too, and is no failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOMENT_S = 2.0
"""Seconds from a death to the word to stop within which one sender told both: Ray may tell of the death first."""


class Interruption:
    """Notes that the run was told to stop, and takes errors of that time for it.

    A terminal, `timeout` and batch systems send their signal to the whole process group, so actors and Ray's own processes
    end together with the driver. Use `around` outside of whatever tells of deaths, and `noticed` inside.
    """

    def __init__(self) -> None:
        self._told_at: float | None = None
        self._failed_at: float | None = None

    def tell(self) -> None:
        """The run is to stop. Of any thread."""
        if self._told_at is None:
            self._told_at = time.monotonic()

    @asynccontextmanager
    async def noticed(self) -> AsyncIterator[None]:
        """Note when the block failed."""
        try:
            yield
        except BaseException:
            self._failed_at = time.monotonic()
            raise

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        """Raise CancelledError in place of errors from when the run was told to stop."""
        try:
            yield
        except Exception as error:
            if self._told_at is not None and self._told_at <= (self._failed_at or time.monotonic()) + MOMENT_S:
                raise asyncio.CancelledError from error
            raise
