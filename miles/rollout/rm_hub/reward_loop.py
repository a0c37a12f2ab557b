"""An event loop in a thread of its own, for users' coroutines: one that blocks cannot stop the caller's loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from miles.utils.http_utils import aclose
from miles.utils.task_stacks import LOOPS

_CANCEL_S = 1.0
_ANSWER_S = 0.5
_END_S = 2.0


class Job:
    """One coroutine in the other loop; `outcome` is a future of the caller's loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, begin: Callable[[], Awaitable[Any]]
    ) -> None:
        self._loop, self._thread, self._begin = loop, thread, begin
        self._callers = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self._callers.create_future()
        self._ended = asyncio.Event()
        self._task: asyncio.Future[Any] | None = None
        self._is_over = False
        context = contextvars.copy_context()
        loop.call_soon_threadsafe(lambda: context.run(self._start))

    def is_in(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Whether it runs in that loop."""
        return self._loop is loop

    async def cancel(self) -> None:
        """Cancel the coroutine, if it runs still, and wait a little for its end."""
        self._is_over = True
        if not self.outcome.done() or self.outcome.cancelled():
            try:
                self._loop.call_soon_threadsafe(self._cancel_there)
                await asyncio.wait_for(self._ended.wait(), _CANCEL_S)
            except (TimeoutError, RuntimeError):  # it is blocked, or the loop was closed
                return

    async def blocked_at(self) -> str | None:
        """`FILE:LINE in NAME` where the loop is kept from running; None when it answers."""
        answered = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(answered.set)
            if await asyncio.to_thread(answered.wait, _ANSWER_S):
                return None
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and f"{os.sep}asyncio{os.sep}" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            return None
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _start(self) -> None:
        if self._is_over:
            self._tell(None, None)
            return
        try:
            self._task = asyncio.ensure_future(self._begin(), loop=self._loop)
        except Exception as error:  # noqa: BLE001 - raised again by whoever awaits the outcome
            self._tell(None, error)
            return
        self._task.add_done_callback(self._done)

    def _cancel_there(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            self._tell(None, asyncio.CancelledError())
        else:
            error = task.exception()
            self._tell(None if error else task.result(), error)

    def _tell(self, result: Any, error: BaseException | None) -> None:
        def settle() -> None:
            self._ended.set()
            if self.outcome.done():
                return
            if isinstance(error, asyncio.CancelledError):
                self.outcome.cancel()
            elif error is not None:
                self.outcome.set_exception(error)
                self.outcome.exception()  # seen, whether or not somebody still waits
            else:
                self.outcome.set_result(result)

        if not self._callers.is_closed():
            self._callers.call_soon_threadsafe(settle)


class RewardLoop:
    """The loop and its thread, started when first needed, and anew after `abandon`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, begin: Callable[[], Awaitable[Any]]) -> Job:
        """Call `begin` in the loop and await what it returns there, in the caller's context."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="rewards", daemon=True)
                self._thread.start()
            assert self._thread is not None
            return Job(self._loop, self._thread, begin)

    def abandon(self, job: Job) -> None:
        """Leave the blocked loop of `job` to itself: the next coroutine gets another. It ends when it is free again."""
        with self._lock:
            if not job.is_in(self._loop):
                return  # it was left already
            loop, self._loop, self._thread = self._loop, None, None
        assert loop is not None
        loop.call_soon_threadsafe(loop.stop)

    async def close(self) -> None:
        """End the loop; one that is blocked stays behind in a thread that keeps no process alive."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join, _END_S)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    LOOPS.add(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
        loop.run_until_complete(aclose())
    finally:
        LOOPS.discard(loop)
        loop.close()
