"""The driver's side of the rollout manager: `Rollout`, and evaluation on an interval."""

from __future__ import annotations

import time
from typing import Any

from miles.core.ports import Metrics, RolloutBatch, Tracker
from miles.ray.phases import PhaseLog
from miles.utils.waits import Waits


def due(step: int, interval: int | None, last_step: int) -> bool:
    """Whether something done every `interval` steps, and after the last, is done after `step`."""
    return interval is not None and ((step + 1) % interval == 0 or step == last_step)


class RolloutClient:
    """Calls the RolloutManager actor under named waits."""

    def __init__(self, manager: Any, waits: Waits, phases: PhaseLog) -> None:
        self._manager, self._waits, self._phases = manager, waits, phases

    async def _call(self, wait: str, method: str, *args: Any) -> Any:
        return await self._waits.on("rollout manager", wait, getattr(self._manager, method).remote(*args))

    async def generate(self, step: int) -> RolloutBatch:
        """Collect the batch of `step`."""
        self._phases.begin("generate", step)
        started_at = time.monotonic()
        batch: RolloutBatch = await self._call(f"generate step {step}", "generate", step)
        seconds = time.monotonic() - started_at
        return RolloutBatch(
            step=step,
            data=batch.data,
            group_indices=batch.group_indices,
            num_samples=batch.num_samples,
            metrics={**batch.metrics, "perf/generate_time": seconds},
        )

    async def commit(self, batch: RolloutBatch) -> None:
        """The groups of `batch` are trained."""
        await self._call(f"commit step {batch.step}", "commit", batch.step, batch.group_indices)

    async def evaluate(self, step: int) -> Metrics:
        """Evaluate all datasets."""
        self._phases.begin("evaluate", step)
        return await self._call(f"evaluate after step {step}", "evaluate", step)

    async def set_weight_version(self, version: int) -> None:
        """The engines hold `version`."""
        await self._call("note the weight version", "set_weight_version", version)

    async def state_dict(self) -> dict[str, Any]:
        """State of data source and ledger."""
        return await self._call("state", "state_dict")


class IntervalEvaluation:
    """Evaluates before training, every `interval` steps, and after the last step."""

    def __init__(
        self, rollout: RolloutClient, tracker: Tracker, steps: range, interval: int | None, *, before: bool
    ) -> None:
        self._rollout, self._tracker, self._steps = rollout, tracker, steps
        self._interval, self._before = interval, before

    async def before_training(self) -> None:
        """Evaluate what a run starts from. A resumed run did so already.

        Except that an evaluation follows its step's checkpoint: one that was due then may have been cut off, so a run
        that resumes there makes it again.
        """
        last_done = self._steps.start - 1
        if last_done < 0:
            if self._interval and self._before:
                await self._run(last_done)
        elif due(last_done, self._interval, self._steps.stop - 1):
            await self._run(last_done)

    async def run_if_due(self, step: int) -> None:
        """Evaluate after `step` if it is due."""
        if due(step, self._interval, self._steps.stop - 1):
            await self._run(step)

    async def _run(self, step: int) -> None:
        started_at = time.monotonic()
        metrics = await self._rollout.evaluate(step)
        self._tracker.log(step, {**metrics, "perf/eval_time": time.monotonic() - started_at})
