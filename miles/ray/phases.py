"""Marks in `events.jsonl` of the phases of the loop: generate, train, save, publish, evaluate."""

from __future__ import annotations

from typing import Any

from miles.core.ports import Metrics, RolloutBatch
from miles.utils.tracking_utils.events import EventLog


class PhaseLog:
    """Notes each phase when it begins."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def begin(self, phase: str, step: int | None) -> None:
        """`phase` of `step` begins; None before the first step."""
        self._events.add("phase", phase=phase, step=step)


class PhasedTrainer:
    """A trainer whose phases are noted; everything else is the trainer's own."""

    def __init__(self, trainer: Any, phases: PhaseLog) -> None:
        self._trainer, self._phases = trainer, phases
        self._step: int | None = None

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Train, noted."""
        self._step = batch.step
        self._phases.begin("train", batch.step)
        return await self._trainer.train(batch)

    async def save(self, folder: str) -> Any:
        """Save, noted."""
        self._phases.begin("save", self._step)
        return await self._trainer.save(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)
