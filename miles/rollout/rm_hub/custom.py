"""Calling a user's reward function, with a time limit, and checking what it returns."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from miles.core.plugins import describe_error, is_async, load_function
from miles.core.samples import reward_value
from miles.errors import HookError
from miles.rollout.rm_hub.reward_errors import RewardTimeoutError
from miles.rollout.rm_hub.reward_loop import RewardLoop

_THREADS = 8


class CustomReward:
    """The function at import path `path`; `call` gives what it returned.

    A coroutine function runs in an event loop of its own in a thread, so that one that blocks (`time.sleep`, a plain
    HTTP call) delays other rewards and nothing else. A plain one runs in a thread of its own, at most eight at a time.
    The limit counts from when the function starts.

    Raises HookError, here when the path does not import, in `call` when the function raises or takes too long.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._function: Callable[..., Any] = load_function(path)
        self._is_async = is_async(self._function)
        self._slots = threading.Semaphore(_THREADS)
        self._loop = RewardLoop()
        self.num_timeouts = 0

    async def call(self, args: Any, subject: Any, name: str) -> Any:
        """`fn(args, subject)`; `name` says in errors which sample or group it was."""
        try:
            if self._is_async:
                return await self._in_loop(lambda: self._function(args, subject), name)
            result = await self._in_thread(args, subject, name)
            return await self._in_loop(lambda: result, name) if inspect.isawaitable(result) else result
        except HookError:
            raise
        except Exception as error:
            raise HookError(self.path, f"on {name}: {describe_error(error)}") from error

    async def _in_loop(self, begin: Callable[[], Awaitable[Any]], name: str) -> Any:
        job = self._loop.start(begin)
        try:
            await asyncio.wait({job.outcome}, timeout=self.timeout_s)
            if job.outcome.done():
                return job.outcome.result()
            blocked_at = await job.blocked_at()
            if blocked_at is None:
                raise self._too_long(name, "it was cancelled")
            self._loop.abandon(job)
            self.num_timeouts += 1
            raise RewardTimeoutError(
                self.path,
                f"took longer than {self.timeout_s:g} s on {name}: {blocked_at} blocks the event loop of the rewards",
                "await there instead, or make the function a plain def, which runs in a thread",
            )
        finally:
            await job.cancel()

    async def close(self) -> None:
        """End the event loop of coroutine functions."""
        await self._loop.close()

    async def _in_thread(self, args: Any, subject: Any, name: str) -> Any:
        """A daemon thread per call: one that hangs must not keep the process alive at its end."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        result: asyncio.Future[Any] = loop.create_future()
        slot = _Slot(self._slots)

        def run() -> None:
            if not slot.acquire():
                return
            try:
                _tell(loop, started, None)
                _tell(loop, result, self._function(args, subject))
            except Exception as error:  # noqa: BLE001 - raised again by whoever awaits the result
                _tell(loop, result, error)
            finally:
                slot.release()

        threading.Thread(target=run, name=f"reward {self.path}", daemon=True).start()
        try:
            await started
            await asyncio.wait({result}, timeout=self.timeout_s)
            if not result.done():
                raise self._too_long(name, "its thread may still be running; make it an async function to have it end")
            return result.result()
        finally:
            slot.release()
            result.cancel()

    def _too_long(self, name: str, after: str) -> HookError:
        self.num_timeouts += 1
        return RewardTimeoutError(
            self.path,
            f"took longer than {self.timeout_s:g} s on {name}; {after}",
            "make it faster, or raise reward.timeout_s",
        )


class _Slot:
    """One place of a semaphore, given back once however often `release` is called, and never taken after that."""

    def __init__(self, semaphore: threading.Semaphore) -> None:
        self._semaphore = semaphore
        self._lock = threading.Lock()
        self._held = self._over = False

    def acquire(self) -> bool:
        """Wait for the place; False when it was released meanwhile: nobody wants it any more."""
        self._semaphore.acquire()
        with self._lock:
            self._held = not self._over
        if not self._held:
            self._semaphore.release()
        return self._held

    def release(self) -> None:
        with self._lock:
            held, self._held, self._over = self._held, False, True
        if held:
            self._semaphore.release()


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: Any) -> None:
    """Settle `future` from another thread, unless nobody waits any more."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


def checked_reward(value: Any, keys: tuple[str, ...]) -> float | dict[str, Any]:
    """What a function returned, as a finite float, or as an object with one under each of `keys` that it has.

    Raises ValueError when it is neither, or when an object has none of `keys`.
    """
    if not isinstance(value, dict):
        return _number(value, None)
    present = [key for key in keys if key in value]
    if not present:
        return _number(value, keys[0] if keys else None)
    return {**value, **{key: _number(value, key) for key in present}}


def _number(value: Any, key: str | None) -> float:
    inner = value.get(key) if isinstance(value, dict) else value
    if isinstance(inner, str | bytes):
        raise ValueError(f"the reward is the text {inner!r:.80}, not a number")
    return reward_value(value, key)
