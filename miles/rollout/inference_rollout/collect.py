"""Collecting a training batch from a data source.

```
data source --get_samples--> in flight --finished--> filter --kept--> batch
     ^                          |  ^                    '--dropped
     '---surplus, reset---------'  '--failed, tried again, at most N times
```
`collect` waits for: the first of the groups in flight to finish; in order of issue, for the oldest of them. Unblocked
by: replies of the engines and rewards.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

from miles.core.ledger import Ledger
from miles.core.plugins import describe_error
from miles.core.ports import DataSource
from miles.core.samples import Group
from miles.errors import ConfigError, DataError, HookError, MilesError, StalledError, TrainingError
from miles.rollout.base_types import RolloutGroup
from miles.rollout.filter_hub.base_types import DynamicFilters
from miles.rollout.groups import excerpt, flatten
from miles.rollout.inference_rollout.error_context import with_context
from miles.rollout.inference_rollout.generate_and_reward import generate_group
from miles.rollout.inference_rollout.starvation import Starvation
from miles.rollout.inference_rollout.state import GenerateState

logger = logging.getLogger(__name__)

PERMANENT_ERRORS = (ConfigError, DataError, TrainingError)
"""Errors that come again however often a group is tried. So does whatever is not Miles' own: a fault of this code,
since errors of users' functions come as HookError."""


@dataclass(slots=True)
class Collected:
    """What `collect` found: the batch, every finished group, and counters."""

    kept: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    finished: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    """Kept and dropped groups, in order of completion."""
    started: int = 0
    returned: int = 0
    retries: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    elapsed_s: float = 0.0
    reward_tail_s: float = 0.0
    """Seconds after the last generation that were spent on rewards."""

    def metrics(self) -> dict[str, float]:
        """Counters and times under `rollout/`."""
        return {
            "rollout/groups_started": float(self.started),
            "rollout/groups_returned": float(self.returned),
            "rollout/group_retries": float(self.retries),
            "rollout/collect_s": self.elapsed_s,
            "rollout/reward_tail_s": self.reward_tail_s,
            "rollout/dynamic_filter/dropped": float(self.dropped.total()),
            **{f"rollout/dynamic_filter/drop_{reason}": float(n) for reason, n in self.dropped.items()},
        }


@dataclass(slots=True, eq=False)
class _InFlight:
    """A group being worked on: the prompt as the data source gave it, and how often it failed."""

    prompt: Group
    number: int
    failures: int = 0


class Collector:
    """Collects batches; keeps no group from one step to the next, the data source does."""

    def __init__(
        self,
        state: GenerateState,
        data_source: DataSource,
        *,
        batch_size: int,
        wave_size: int,
        max_retries: int,
        group_timeout_s: float | None = None,
        filters: DynamicFilters | None = None,
        max_filtered_batches: int = 20,
        ledger: Ledger | None = None,
        in_order: bool = False,
    ) -> None:
        """A group that takes longer than `group_timeout_s` counts as failed. When `filters` drop `max_filtered_batches`
        times the batch size of groups in a row, the step fails.

        With `in_order`, groups are judged in the order in which they were issued, whenever they finish.

        What a batch holds, what is dropped, what is started and what goes back then depends on the groups alone, not on
        the time that each took.
        """
        self._state, self._source, self._ledger = state, data_source, ledger or Ledger()
        self._in_order = in_order
        self._batch_size, self._wave_size, self._max_retries = batch_size, wave_size, max_retries
        self._group_timeout_s = group_timeout_s
        self._filters = filters or DynamicFilters()
        self._most_drops = max_filtered_batches * batch_size

    async def collect(self) -> Collected:
        """A batch of groups, kept ones sorted by their number.

        Every group that was started ends as kept, dropped by the filter, or given back to the data source as it came:
        surplus, or everything when the step fails. Raises the error of a group that failed once more than
        `max_retries` allows (in order of issue: when its turn comes, so not for surplus), and TrainingError when the
        filters keep nothing for too long.
        """
        started_at = time.monotonic()
        result = Collected()
        running: dict[asyncio.Task[RolloutGroup], _InFlight] = {}
        held: list[_InFlight] = []
        starvation = Starvation(self._filters.paths, self._most_drops)
        try:
            while len(result.kept) < self._batch_size:
                while len(result.kept) + len(running) < self._batch_size:
                    for group in self._take(self._wave_size):
                        result.started += 1
                        work = self._work(group, result)
                        running[asyncio.create_task(work, name=f"group {group.number}")] = group
                awaited = [next(iter(running))] if self._in_order else running
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda t: running[t].number):
                    if len(result.kept) == self._batch_size:
                        break  # the rest is surplus
                    group = running.pop(task)
                    if (error := task.exception()) is not None:
                        self._fail(group, error)
                    finished = task.result()
                    held.append(group)
                    self._ledger.finish(group.number)
                    result.finished.append(finished)
                    verdict = await self._filters.judge(self._state.args, finished)
                    if verdict.keep:
                        result.kept.append(finished)
                        starvation.note_kept()
                    else:
                        reason = verdict.reason or "filtered"
                        result.dropped[reason] += 1
                        held.remove(group)
                        self._ledger.drop(group.number, reason)
                        starvation.note_dropped(finished, reason)
        except BaseException as error:
            await self._cancel(running)
            try:
                self._give_back([*running.values(), *held])
            except HookError as second:
                error.add_note(f"and the prompts could not be given back: {second}")
            raise
        await self._cancel(running)
        self._give_back(list(running.values()))
        result.returned = len(running)
        result.kept.sort(key=by_index)
        result.elapsed_s = time.monotonic() - started_at
        result.reward_tail_s = max(0.0, time.monotonic() - max(self._state.last_generation_end, started_at))
        return result

    def _take(self, count: int) -> list[_InFlight]:
        groups: list[Group] = self._ask_source("get_samples", count)
        if len(groups) != count or not all(groups):
            raise HookError(
                f"{type(self._source).__name__}.get_samples",
                f"returned {len([g for g in groups if g])} groups, but {count} were asked for",
                "return exactly num_samples groups of samples; begin again at the end of the data",
            )
        taken: list[_InFlight] = []
        for group in groups:
            taken.append(_InFlight(prompt=group, number=self._number(group)))
            self._ledger.start(taken[-1].number)
        return taken

    def _number(self, group: Group) -> int:
        """The group's number; where a data source sets none, groups and samples are numbered in order of issue."""
        found = group[0].group_index
        number = self._ledger.newest + 1 if found is None else found
        for position, sample in enumerate(group):
            sample.group_index = number
            if sample.index is None:
                sample.index = number * len(group) + position
        return number

    async def _work(self, group: _InFlight, result: Collected) -> RolloutGroup:
        """Generate and reward a copy, so that the prompt can be tried again or given back as it came.

        Raises the last error, with what was tried, when the group failed once more than `max_retries` allows.
        """
        while True:
            limit = asyncio.timeout(self._group_timeout_s)
            try:
                async with limit:
                    return await generate_group(self._state, copy.deepcopy(group.prompt))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                error: Exception = MilesError(
                    "a generate or reward function ended its own task by raising CancelledError; let it raise "
                    "another error"
                )
            except TimeoutError:
                if not limit.expired():
                    raise
                error = StalledError(f"it took longer than {self._group_timeout_s:g} s (--rollout-group-timeout)")
            except Exception as found:
                if isinstance(found, PERMANENT_ERRORS) or not isinstance(found, MilesError):
                    raise
                error = found
            group.failures += 1
            if group.failures > self._max_retries:
                context = (
                    f"prompt group {group.number} failed {group.failures} times; prompt: {excerpt(group.prompt[0])}"
                )
                raise with_context(error, context) from error
            logger.warning(
                "prompt group %d failed (%d of %d retries used): %s",
                group.number,
                group.failures - 1,
                self._max_retries,
                error,
            )
            result.retries += 1

    def _fail(self, group: _InFlight, error: BaseException) -> NoReturn:
        if isinstance(error, Exception):
            self._ledger.fail(group.number, type(error).__name__)
        raise error

    async def _cancel(self, running: dict[asyncio.Task[RolloutGroup], _InFlight]) -> None:
        """End what still runs: its connections close, the router ends the requests, and the engines drop them."""
        self._state.aborted = True
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for task in running:
            if not task.cancelled():
                task.exception()  # seen: it does not matter any more
        self._state.aborted = False

    def _give_back(self, groups: list[_InFlight]) -> None:
        """Put prompts back into the data source as they came."""
        groups.sort(key=lambda g: g.number)
        for group in groups:
            for sample in group.prompt:
                sample.reset_for_retry()
            if self._ledger.state_of(group.number) == "in_flight":
                self._ledger.interrupt(group.number)
        if groups:
            self._ask_source("add_samples", [group.prompt for group in groups])

    def _ask_source(self, method: str, argument: Any) -> Any:
        try:
            return getattr(self._source, method)(argument)
        except MilesError:
            raise
        except Exception as error:
            name = f"{type(self._source).__name__}.{method}"
            raise HookError(name, describe_error(error), "mend the data source") from error


def by_index(group: RolloutGroup) -> int:
    """Sort key of groups: the number of their first sample."""
    return next(flatten(group)).index or 0
