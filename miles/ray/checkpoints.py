"""`IntervalCheckpoints`: complete checkpoints of trainer, data source, ledger and versions."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from miles.core.ports import Rollout, Tracker, Trainer, WeightPublisher
from miles.ray.rollout_client import due
from miles.utils import checkpoint_folder


class IntervalCheckpoints:
    """Saves every `interval` steps and after the last, under `folder/iter_*`."""

    def __init__(
        self,
        folder: Path,
        interval: int | None,
        steps: range,
        *,
        trainer: Trainer,
        rollout: Rollout,
        weights: WeightPublisher,
        tracker: Tracker,
    ) -> None:
        self._folder, self._interval, self._steps = folder, interval, steps
        self._trainer, self._rollout, self._weights, self._tracker = trainer, rollout, weights, tracker

    async def save_if_due(self, step: int) -> None:
        """Save after `step` if it is due; the checkpoint is complete or absent."""
        if not due(step, self._interval, self._steps.stop - 1):
            return
        started_at = time.monotonic()
        with checkpoint_folder.writing(self._folder, step + 1) as draft:
            rollout_state, _ = await asyncio.gather(self._rollout.state_dict(), self._trainer.save(str(draft)))
            state = {"next_step": step + 1, "weight_version": self._weights.version, "rollout": rollout_state}
            checkpoint_folder.write_state(draft, state)
        self._tracker.log(step, {"perf/save_time": time.monotonic() - started_at})
