"""`IntervalCheckpoints`: complete checkpoints of trainer, data source, ledger and versions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.ports import Rollout, Tracker, Trainer, WeightPublisher
from miles.errors import CheckpointError
from miles.ray.rollout_client import due
from miles.utils import checkpoint_folder, run_record
from miles.utils.run_record import RunRecord

logger = logging.getLogger(__name__)

LAST_MOMENT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Write:
    """A checkpoint that is being written beside the run."""

    task: asyncio.Task[None]
    answers_sentinel: bool


class IntervalCheckpoints:
    """Saves under `folder/iter_*`: every `interval` steps and after the last, and whenever the file `sentinel` exists.

    With `keep_last`, each complete save removes the older checkpoints beyond so many, except `loaded_from`. With
    `in_background` a step waits only for a copy in memory; at most one checkpoint is being written at a time. A save that
    fails ends the run, at the latest at the next step: to go on would lose what checkpoints are for. `record` goes into
    every checkpoint.
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
        record: RunRecord,
        sentinel: Path | None = None,
        keep_last: int | None = None,
        loaded_from: Path | None = None,
        in_background: bool = False,
    ) -> None:
        self._folder, self._interval, self._steps = folder, interval, steps
        self._trainer, self._rollout, self._weights, self._tracker = trainer, rollout, weights, tracker
        self._record = record
        self._sentinel, self._keep_last, self._loaded_from = sentinel, keep_last, loaded_from
        self._in_background = in_background
        self._write: _Write | None = None

    async def save_if_due(self, step: int) -> None:
        """Save after `step` if it is due or asked for; the checkpoint is complete or absent.

        The file that asked is deleted once the checkpoint is complete. Raises CheckpointError when this save fails, or
        one that was begun before; and when that file, or a checkpoint that is not kept, cannot be removed.
        """
        if self._write is not None and self._write.task.done():
            await self.finish()
        asked = self._sentinel is not None and self._sentinel.is_file()
        being_answered = self._write is not None and self._write.answers_sentinel
        if not (asked and not being_answered) and not due(step, self._interval, self._steps.stop - 1):
            return
        started_at = time.monotonic()
        await self.finish()
        if self._in_background:
            draft = checkpoint_folder.start(self._folder, step + 1)
            try:
                await self._write_state(draft, step, self._trainer.copy_state())
            except BaseException:
                checkpoint_folder.discard(draft)
                raise
            self._write = _Write(asyncio.create_task(self._write_copy(step, draft, asked)), asked)
        else:
            with checkpoint_folder.writing(self._folder, step + 1) as draft:
                await self._write_state(draft, step, self._trainer.save(str(draft)))
            await self._after(step, asked)
        self._tracker.log(step, {"perf/save_time": time.monotonic() - started_at})

    async def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; raises CheckpointError when it failed."""
        if self._write is not None:
            task = self._write.task
            try:
                await asyncio.shield(task)  # an interrupt ends this wait, not the write
            finally:
                if task.done():
                    self._write = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Around the run: a checkpoint that is still being written at its end is waited for.

        After an error it has `LAST_MOMENT_S` seconds more, and is discarded if it is not complete by then.
        """
        try:
            yield
            await self.finish()
        except BaseException:
            await self._abandon()
            raise

    async def _abandon(self) -> None:
        if self._write is not None:
            task, self._write = self._write.task, None
            await asyncio.wait({task}, timeout=LAST_MOMENT_S)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("%s", error)

    async def _write_state(self, draft: Path, step: int, trainer_work: Any) -> None:
        """Write `state.json`, taken while the trainer saves or copies: nothing else goes on then; and `run.json`."""
        rollout_state, _ = await asyncio.gather(self._rollout.state_dict(), trainer_work)
        state = {"next_step": step + 1, "weight_version": self._weights.version, "rollout": rollout_state}
        checkpoint_folder.write_state(draft, state)
        run_record.write(draft, self._record)

    async def _write_copy(self, step: int, draft: Path, asked: bool) -> None:
        try:
            seconds = await self._trainer.save_copy(str(draft))
            await asyncio.to_thread(checkpoint_folder.complete, draft, step + 1)
        except OSError as error:
            told = checkpoint_folder.cannot_write(draft, error)
            checkpoint_folder.discard(draft)
            raise told from error
        except BaseException:
            checkpoint_folder.discard(draft)
            raise
        await self._after(step, asked)
        self._tracker.log(step, {"perf/save_write_time": seconds})

    async def _after(self, step: int, asked: bool) -> None:
        """What follows a complete checkpoint: answer the file that asked for it, remove the ones not kept."""
        if asked:
            self._answer_sentinel()
        if self._keep_last is not None:
            await asyncio.to_thread(
                checkpoint_folder.remove_older, self._folder, step + 1, self._keep_last, self._loaded_from
            )

    def _answer_sentinel(self) -> None:
        assert self._sentinel is not None
        try:
            self._sentinel.unlink(missing_ok=True)
        except OSError as e:
            raise CheckpointError(
                f"{self._sentinel}: cannot be deleted ({e.strerror}), so every step would save\n"
                "    fix: give --save-trigger-sentinel a file in a folder that this user may write to"
            ) from e
