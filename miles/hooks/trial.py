"""One function on trial: how it is called, and what is judged alike for all kinds of hooks."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.hook_contracts import Contract
from miles.core.plugins import describe_error, is_async, maybe_await
from miles.core.samples import Sample
from miles.errors import MilesError
from miles.hooks import samples
from miles.hooks.findings import Report
from miles.rollout.groups import flatten

TICK_S = 0.02
SLOW_LOOP_S, HELD_LOOP_S = 0.25, 1.0
"""Seconds for which an async function that does not await may stop every other request: noted, and a failure."""
_UNTOLD = (TypeError, AttributeError, LookupError, AssertionError, ArithmeticError)
"""Errors that Python raises by itself: they do not say what is wrong with the data."""
IDENTITY = ("group_index", "index", "rollout_id", "prompt", "label")
CONTENT = ("tokens", "response", "response_length", "rollout_log_probs", "version_spans", "status")
TRAINED = ("loss_mask", "remove_sample")


@dataclass(slots=True, kw_only=True)
class Trial:
    """A function, what it is called with, and where findings go."""

    path: str
    contract: Contract
    fn: Any
    """What the path names."""
    form: str
    """Name of the call that fits it; "class" for a class."""
    config: RunConfig
    args: HookArgs
    report: Report
    time_limit_s: float
    prompts: Sequence[Sample]
    given: Sequence[list[Any]] | None = None
    """Groups that the author gave, in place of made-up ones."""

    async def call(self, *args: Any, fn: Any = None, **kwargs: Any) -> Any:
        """What the function returns, awaited where it must be; a plain one runs in a thread, as in a run.

        Raises TimeoutError after the time limit, for functions that await or are plain; one that never gives control
        back is ended by the owner of this process.
        """
        function = fn or self.fn
        if is_async(function):
            return await asyncio.wait_for(function(*args, **kwargs), self.time_limit_s)
        result = await asyncio.wait_for(asyncio.to_thread(function, *args, **kwargs), self.time_limit_s)
        return await asyncio.wait_for(maybe_await(result), self.time_limit_s)

    def cases(self) -> list[samples.Case]:
        """Single samples without reward."""
        if self.given is None:
            return samples.cases(self.prompts)
        found = [copy.deepcopy(s) for group in self.given for s in flatten(group)]
        for sample in found:
            sample.reward = None
        return [samples.Case(name=f"sample {s.index} of the file", sample=s) for s in found]

    def groups(self) -> list[list[Any]]:
        """Finished groups with rewards."""
        if self.given is not None:
            return copy.deepcopy(list(self.given))
        return samples.groups(self.prompts, self.config.reward.reward_key)

    def raised(self, error: Exception, *, may_refuse: bool = False, wanted: str) -> None:
        """Judge an error of the running test: `may_refuse` where it is right to raise one that says what is wrong."""
        text = where_raised(error)
        if isinstance(error, TimeoutError) and not str(error):
            self.report.fails(f"took longer than {self.time_limit_s:g} s", "make it faster, or give --timeout SECONDS")
        elif not may_refuse:
            self.report.fails(text, wanted)
        elif isinstance(error, _UNTOLD) or not str(error).strip():
            self.report.fails(text, f"{wanted}, or raise ValueError with what the sample lacks")
        else:
            self.report.ok(f"refuses it: {text.splitlines()[0]}")

    def unchanged(self, before: Snapshot, items: Any, *, mend: str) -> None:
        """Judge whether the items of `before` are as they were."""
        self.report.begin("changes nothing that it must not")
        changed = before.differences(items)
        if changed:
            self.report.fails("; ".join(changed[:3]), mend)
        else:
            self.report.ok()

    def sendable(self, what: str, value: Any) -> None:
        """Judge whether a value can go to another process."""
        self.report.begin("can be sent to another process")
        try:
            pickle.loads(pickle.dumps(value))
        except Exception as error:  # noqa: BLE001 - whatever pickle raises is the finding
            self.report.fails(
                f"{what}: {type(error).__name__}: {error}", "put only numbers, texts, lists and mappings into samples"
            )
        else:
            self.report.ok()


class Snapshot:
    """Fields of samples, in order, as they were."""

    def __init__(self, items: Any, fields: Iterable[str]) -> None:
        self._fields = tuple(fields)
        self._before = self._taken(items)

    def _taken(self, items: Any) -> list[dict[str, Any]]:
        return [{name: copy.deepcopy(getattr(s, name)) for name in self._fields} for s in flatten(items)]

    def differences(self, items: Any) -> list[str]:
        """What changed, in words."""
        after = self._taken(items)
        if len(after) != len(self._before):
            return [f"there were {len(self._before)} samples, and there are {len(after)}"]
        return [
            f"{name} of sample {b} was {_short(old[name])} and is {_short(new[name])}"
            for b, (old, new) in enumerate(zip(self._before, after, strict=True))
            for name in self._fields
            if old[name] != new[name]
        ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def where_raised(error: BaseException) -> str:
    """What was raised, and the line that raised it."""

    return str(error) if isinstance(error, MilesError) else describe_error(error)


class LoopWatch:
    """`async with LoopWatch() as watch:` measures for how long the event loop stood still."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> LoopWatch:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(TICK_S)
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - before - TICK_S)

    def judge(self, report: Report) -> None:
        """Judge the stand-still."""
        report.begin("lets other requests run")
        text = f"the event loop stood still for {self.longest_s:.2f} s: no other request ran meanwhile"
        if self.longest_s > HELD_LOOP_S:
            report.fails(text, "await what takes time, or make it a plain `def`, which runs in a thread")
        elif self.longest_s > SLOW_LOOP_S:
            report.note(text)
        else:
            report.ok()
