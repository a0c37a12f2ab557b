"""Counting reward errors, and stopping a step that has too many: an error is never a reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from miles.core.samples import Sample
from miles.errors import HookError, TrainingError
from miles.rollout.groups import excerpt

_SHOWN = 3
_SHOWN_CHARS = 500


class RewardTimeoutError(HookError):
    """A reward took longer than its limit."""


@dataclass(slots=True)
class _Step:
    """The reward calls of one step."""

    expected: int
    calls: int = 0
    errors: int = 0
    shown: list[str] = field(default_factory=list[str])


class RewardErrors:
    """What went wrong since the start, by type, and the share of it in the present step.

    Inside `step`, `note` raises TrainingError as soon as more than `max_rate` of the step's calls failed; outside, such
    as in an evaluation, errors are counted only.
    """

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._types: Counter[str] = Counter()
        self._step: _Step | None = None

    @contextmanager
    def step(self, expected: int) -> Iterator[None]:
        """A step that needs at least `expected` rewards: the share is of these, or of the calls once they are more."""
        self._step = _Step(expected)
        try:
            yield
        finally:
            self._step = None

    def note_calls(self, count: int) -> None:
        """As many samples are to be rewarded."""
        if self._step is not None:
            self._step.calls += count

    def note(self, samples: list[Sample], error: Exception) -> None:
        """The reward of these samples failed. Raises TrainingError when that is too much."""
        self._types[error_type(error)] += len(samples)
        step = self._step
        if step is None:
            return
        step.errors += len(samples)
        if len(step.shown) < _SHOWN:
            text = "\n      ".join(line.strip() for line in str(error)[:_SHOWN_CHARS].splitlines())
            step.shown.append(f"sample {samples[0].index}, prompt {excerpt(samples[0])!r}: {text}")
        calls = max(step.calls, step.expected)
        if step.errors > self._max_rate * calls:
            lines = "".join(f"\n  - {line}" for line in step.shown)
            raise TrainingError(
                f"{step.errors} of the {calls} rewards of this step failed, more than --max-reward-error-rate "
                f"{self._max_rate:g} allows; the first:{lines}\n"
                "    fix: mend the reward or what it calls, or allow more with --max-reward-error-rate"
            ) from error

    def metrics(self) -> dict[str, float]:
        """Samples whose reward failed since the start, by type of error."""
        return {f"rollout/reward_errors/{name}": float(count) for name, count in sorted(self._types.items())}


def error_type(error: Exception) -> str:
    """`timeout`, or the name of the error's class: of what a function raised, not of the HookError around it."""
    inner = error.__cause__ or error
    if isinstance(error, RewardTimeoutError) or isinstance(inner, TimeoutError):
        return "timeout"
    return type(inner).__name__
