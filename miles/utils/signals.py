"""Answering signals in a thread, so that they are answered while the main thread and its event loop hang."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class SignalThread:
    """Calls a handler in a thread of its own for each signal that `answer` names; a context, entered in the main thread.

    A signal reaches the thread through a pipe, written by the interpreter's own handler without waiting for the main
    thread. asyncio's `add_signal_handler` uses the same pipe and must not be used beside it.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[], Any]] = {}
        self._before: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> SignalThread:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write_fd)
        self._thread.join(timeout=1.0)

    def answer(self, handlers: Mapping[int, Callable[[], Any]]) -> None:
        """Call `handlers[number]()` for a signal from now on. Other signals wake the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._handlers.update(handlers)
        for number in handlers:
            self._before.setdefault(number, signal.signal(number, _seen))

    def _run(self) -> None:
        while numbers := os.read(self._read_fd, 64):
            for number in numbers:
                if number in self._handlers:
                    self._call(self._handlers[number])
                elif self._loop is not None and not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(lambda: None)
        os.close(self._read_fd)

    def _call(self, handler: Callable[[], Any]) -> None:
        """A handler that breaks must not take the answers to later signals with it."""
        try:
            handler()
        except Exception:
            logger.exception("a signal could not be answered")


def _seen(number: int, frame: Any) -> None:
    """Nothing: the thread has been told."""
