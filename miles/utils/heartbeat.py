"""A thread in each process of a run that writes, every second, what the process waits for and whether its event loop runs.

It writes `RUN_DIR/waits/ROLE.json`, so that waits can be read when Ray, a network or an event loop hangs. A process that
says nothing any more is stopped, dead, or in code that keeps the interpreter to itself.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO, Any

import orjson

from miles.utils.task_stacks import LOOPS, task_stacks
from miles.utils.waits import OPEN, OpenWaits

logger = logging.getLogger(__name__)

FOLDER = "waits"
"""Below the run folder; it is there while the run lasts, and what a killed run left is kept."""
VARIABLE = "MILES_HEARTBEAT"
"""Environment variable by which the owner of a process tells it where to write, without `.json`."""
BEAT_S = 1.0
LARGEST_SHARE = 0.003
"""Share of a core that beats may take; with very many waits they come less often."""
STUCK_S = 2.0
"""Seconds without an answer after which an event loop is called stuck."""
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a process write the stacks of its threads to `ROLE.stacks`, and with the next beat those of its tasks."""
STACKS_END = b"-- end of the stacks\n"
_SHOWN_FRAMES = 4

CHILDREN: dict[str, int] = {}
"""Name -> process id of the processes that this one owns."""


class Heartbeat:
    """Writes `FOLDER/ROLE.json`: process id, time, open waits, children, and since when the watched loop is stuck.

    With `blocks`, the loop's thread does the process's work, so that being stuck is its way of being busy.
    """

    def __init__(
        self, role: str, folder: Path, *, blocks: bool = False, open_waits: OpenWaits = OPEN, beat_s: float = BEAT_S
    ) -> None:
        self.role, self.folder = role, folder
        self._blocks, self._open, self._beat_s = blocks, open_waits, beat_s
        self._path, self._draft = folder / f"{role}.json", folder / f".{role}.json"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._asked: float | None = None
        self._stop = threading.Event()
        self._told = False
        self._writing = threading.Lock()
        self._stacks: IO[bytes] | None = None
        self._stacks_bytes = 0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        """Begin, with the event loop of the calling thread watched if one runs there; the first beat is written at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        except RuntimeError:
            self._loop = None
        self._stacks = open(self.folder / f"{self.role}.stacks", "ab", buffering=0)  # noqa: SIM115 - the signal writes to it
        self._stacks_bytes = self._stacks.tell()
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self.beat()
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread; the last beat stays on disk."""
        self._stop.set()
        self._thread.join()
        if self._stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self._stacks.close()

    def beat(self) -> None:
        """Write one. A disk that is full or gone is told once and stops nothing."""
        stuck_s = self._ask_loop()
        state = {
            "role": self.role,
            "pid": os.getpid(),
            "written": time.monotonic(),
            "loop_stuck_s": stuck_s,
            "blocks": self._blocks,
            "at": self._frames() if stuck_s is not None else [],
            "children": CHILDREN.copy(),
            "waits": [asdict(group) for group in self._open.grouped()],
        }
        try:
            with self._writing:
                self._draft.write_bytes(orjson.dumps(state))
                self._draft.replace(self._path)
        except OSError as error:
            if not self._told and not self._stop.is_set():
                self._told = True
                logger.warning("the heartbeat cannot be written, so hangs will be explained badly: %s", error)

    def _run(self) -> None:
        pause_s = self._beat_s
        while not self._stop.wait(pause_s):
            began = time.thread_time()
            self.beat()
            self._add_task_stacks()
            pause_s = max(self._beat_s, (time.thread_time() - began) / LARGEST_SHARE)

    def _add_task_stacks(self) -> None:
        """Once the signal has written to the file: add what it could not see."""
        assert self._stacks is not None
        if os.fstat(self._stacks.fileno()).st_size > self._stacks_bytes:
            for loop in (self._loop, *LOOPS):
                if loop is not None:
                    self._stacks.write(f"\n{task_stacks(loop)}\n".encode())
            self._stacks.write(STACKS_END)
            self._stacks_bytes = os.fstat(self._stacks.fileno()).st_size

    def _ask_loop(self) -> float | None:
        """Ask the loop for a sign of life; seconds since it was asked when it has long not answered, else None."""
        now = time.monotonic()
        if self._loop is None:
            return None
        if self._asked is not None:
            return now - self._asked if now - self._asked > STUCK_S else None
        self._asked = now
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop was closed
            self._loop = None
        return None

    def _answer(self) -> None:
        self._asked = None

    def _frames(self) -> list[str]:
        """Where the loop's thread is, innermost first, without the frames of the event loop itself."""
        frame: FrameType | None = sys._current_frames().get(self._loop_thread)
        shown: list[str] = []
        while frame is not None and len(shown) < _SHOWN_FRAMES:
            code = frame.f_code
            if f"{os.sep}asyncio{os.sep}" not in code.co_filename:
                shown.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return shown


_mine: Heartbeat | None = None


def start(role: str, folder: Path, *, blocks: bool = False) -> Heartbeat:
    """Start the heartbeat of this process; one that was started before ends."""
    global _mine
    if _mine is not None:
        _mine.stop()
    _mine = Heartbeat(role, folder, blocks=blocks).start()
    return _mine


def stop() -> None:
    """End the heartbeat of this process, if it has one."""
    global _mine
    if _mine is not None:
        _mine.stop()
        _mine = None


def beat() -> None:
    """Write a heartbeat of this process now, if it has one."""
    if _mine is not None:
        _mine.beat()


@contextmanager
def of_driver(run_dir: Path) -> Iterator[None]:
    """The driver's heartbeat; the folder of heartbeats begins empty and is removed after a run that ended."""
    folder = run_dir / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    start("driver", folder)
    try:
        yield
    finally:
        stop()
        shutil.rmtree(folder, ignore_errors=True)


def environment_of(child: str) -> dict[str, str]:
    """What the environment of a child named `child` needs, so that `start_as_child` writes beside this process."""
    return {VARIABLE: str(_mine.folder / child)} if _mine is not None else {}


def start_as_child() -> None:
    """Start the heartbeat that the owner asked for, if it did."""
    if path := os.environ.get(VARIABLE):
        start(Path(path).name, Path(path).parent)


def read(folder: Path) -> list[dict[str, Any]]:
    """The last beat of every process."""
    beats: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            beats.append(orjson.loads(path.read_bytes()))
        except (OSError, orjson.JSONDecodeError):  # removed meanwhile, or not ours
            logger.warning("%s cannot be read", path)
    return beats
