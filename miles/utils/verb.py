"""The frame of a verb of `miles`: its help, its options, its work, and the exit status of every end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

from miles.errors import ConfigError, MilesError

Options = TypeVar("Options")


def run_verb(
    argv: Sequence[str],
    read: Callable[[Sequence[str]], Options],
    work: Callable[[Options], int],
    *,
    help_text: str,
    word: str | None = None,
    usage: str = "",
    left: Callable[[Options], str] = lambda options: "",
) -> int:
    """Read options and work; returns the exit status, and tells on stderr what went wrong.

    What `work` returns; 1: it raised a MilesError; 2: the command line, a recipe or a function's name is wrong (a ConfigError,
    or `word` is not the first of `argv`); 130: Ctrl-C. SIGTERM unwinds the stack too, and exits with 143. `left` says where
    something is that an end leaves behind.
    """
    if "--help" in argv or list(argv[:1]) == ["-h"]:
        sys.stdout.write(help_text)
        return 0
    if word is not None:
        if list(argv[:1]) != [word]:
            found = f"there is no {argv[0]!r} here\n" if argv else ""
            sys.stderr.write(f"{found}{usage}\n")
            return 2
        argv = argv[1:]
    try:
        options = read(argv)
    except MilesError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        with ending_on_sigterm():
            return work(options)
    except MilesError as error:
        sys.stderr.write(f"{error}\n{_line(left(options))}")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; every process has ended\n{_line(left(options))}")
        return 130


def _line(text: str) -> str:
    return f"    {text}\n" if text else ""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that processes and files are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
