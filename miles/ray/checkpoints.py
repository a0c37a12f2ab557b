"""`IntervalCheckpoints`: complete checkpoints of trainer, data source, ledger and versions."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from miles.core.ports import Rollout, Tracker, Trainer, WeightPublisher
from miles.errors import CheckpointError
from miles.ray.rollout_client import due
from miles.utils import checkpoint_folder


class IntervalCheckpoints:
    """Saves under `folder/iter_*`: every `interval` steps and after the last, and whenever the file `sentinel` exists.

    With `keep_last`, each complete save removes the older checkpoints beyond so many, except `loaded_from`.
    """

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
        sentinel: Path | None = None,
        keep_last: int | None = None,
        loaded_from: Path | None = None,
    ) -> None:
        self._folder, self._interval, self._steps = folder, interval, steps
        self._trainer, self._rollout, self._weights, self._tracker = trainer, rollout, weights, tracker
        self._sentinel, self._keep_last, self._loaded_from = sentinel, keep_last, loaded_from

    async def save_if_due(self, step: int) -> None:
        """Save after `step` if it is due or asked for; the checkpoint is complete or absent.

        The file that asked is deleted once the checkpoint is complete. Raises CheckpointError when it, or a checkpoint
        that is not kept, cannot be removed.
        """
        asked = self._sentinel is not None and self._sentinel.is_file()
        if not asked and not due(step, self._interval, self._steps.stop - 1):
            return
        started_at = time.monotonic()
        with checkpoint_folder.writing(self._folder, step + 1) as draft:
            rollout_state, _ = await asyncio.gather(self._rollout.state_dict(), self._trainer.save(str(draft)))
            state = {"next_step": step + 1, "weight_version": self._weights.version, "rollout": rollout_state}
            checkpoint_folder.write_state(draft, state)
        if asked:
            self._answer_sentinel()
        if self._keep_last is not None:
            await asyncio.to_thread(
                checkpoint_folder.remove_older, self._folder, step + 1, self._keep_last, self._loaded_from
            )
        self._tracker.log(step, {"perf/save_time": time.monotonic() - started_at})

    def _answer_sentinel(self) -> None:
        assert self._sentinel is not None
        try:
            self._sentinel.unlink(missing_ok=True)
        except OSError as e:
            raise CheckpointError(
                f"{self._sentinel}: cannot be deleted ({e.strerror}), so every step would save\n"
                "    fix: give --save-trigger-sentinel a file in a folder that this user may write to"
            ) from e
