"""Explaining a hang: the wait graph as text and as an event, and the stacks of the processes on its longest chain."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path

from miles.errors import MilesError
from miles.ray import stacks, wait_graph
from miles.utils import heartbeat
from miles.utils.tracking_utils.events import EventLog

logger = logging.getLogger(__name__)

_MOST_STACKS = 16
"""Processes whose stacks are asked for."""
NO_BEAT = "the wait graph is not known: the driver's heartbeat could not be written"


class HangExplainer:
    """Reads the heartbeats in `RUN_DIR/waits`; what it finds also goes to `events.jsonl` as "wait graph".

    It needs neither Ray nor an event loop and may be called in any thread.
    """

    def __init__(self, run_dir: Path, events: EventLog) -> None:
        self._waits_dir, self._logs_dir = run_dir / heartbeat.FOLDER, run_dir / "logs"
        self._events = events
        self._lock = threading.Lock()

    def long_wait(self, owner: str, name: str) -> str:
        """What the chain that begins with the driver's wait for `owner` to do `name` ends at, in one line."""
        with self._lock:
            driver = self._graph()
            if driver is None:
                return NO_BEAT
            found = self._note(driver, wait_graph.culprit(driver, owner, name), "long wait")
            return f"probably: {found.text}{self._last_words(found)}"

    def stalled(self, owner: str, name: str) -> str:
        """The whole graph, what the chain that begins with this wait ends at, and where the stacks are."""
        return self._full("stalled", owner, name)

    def asked(self) -> str:
        """The whole graph, and where the stacks are, for whoever sent SIGUSR1."""
        return self._full("SIGUSR1")

    def _graph(self) -> wait_graph.ProcessNode | None:
        heartbeat.beat()  # the driver's own waits are of this moment
        return wait_graph.build(heartbeat.read(self._waits_dir), wait_graph.now())

    def _note(self, driver: wait_graph.ProcessNode, found: wait_graph.Culprit, cause: str) -> wait_graph.Culprit:
        try:
            self._events.add("wait graph", cause=cause, probably=found.text, graph=asdict(driver))
        except MilesError as error:  # the disk is full: the hang is still to be told
            logger.warning("%s", error)
        return found

    def _full(self, cause: str, owner: str = "", name: str = "") -> str:
        with self._lock:
            driver = self._graph()
            if driver is None:
                return NO_BEAT
            found = self._note(driver, wait_graph.culprit(driver, owner, name), cause)
            alive = [node for node in found.involved if not node.is_gone][:_MOST_STACKS]
            answering = {node.role: node.pid for node in alive if node.answers}
            silent = {node.role: node.pid for node in alive if not node.answers}
            out = self._logs_dir / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            try:
                told = stacks.collect(answering, silent, self._waits_dir, out)
            except OSError as error:
                told = f"no stacks: {error}"
            return f"{wait_graph.render(driver, found)}{self._last_words(found)}\n{told}"

    def _last_words(self, found: wait_graph.Culprit) -> str:
        return wait_graph.last_words(self._logs_dir, found.works) if found.works else ""
