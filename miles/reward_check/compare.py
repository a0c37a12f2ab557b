"""Stored rewards against those of now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles.reward_check.samples import Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What became of one sample."""

    saved: Saved
    now: Any = None
    error: str | None = None
    """Why there is no reward."""
    seconds: float = 0.0
    differs: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether there are two rewards."""
        return self.error is None and self.saved.stored is not None


def differ(stored: Any, now: Any, reward_key: str | None, tolerance: float) -> bool:
    """Whether two rewards are not the same.

    With `reward_key`, its entry alone counts; else two objects are compared by every number that either has.
    """
    if stored is None:
        return False
    if reward_key is not None:
        stored, now = _entry(stored, reward_key), _entry(now, reward_key)
    if isinstance(stored, dict) and isinstance(now, dict):
        keys = {key for reward in (stored, now) for key, value in reward.items() if _number(value) is not None}
        return any(differ_numbers(stored.get(key), now.get(key), tolerance) for key in keys)
    return differ_numbers(stored, now, tolerance)


def differ_numbers(a: Any, b: Any, tolerance: float) -> bool:
    """Whether not both are numbers, or they are further apart than `tolerance`."""
    x, y = _number(a), _number(b)
    return x is None or y is None or abs(x - y) > tolerance


def _entry(reward: Any, key: str) -> Any:
    return reward.get(key) if isinstance(reward, dict) else reward


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def mean(rewards: Sequence[Any], reward_key: str | None) -> float | None:
    """Mean of the rewards that are numbers, or have one under `reward_key`; None without any."""
    numbers = [
        number
        for reward in rewards
        if (number := _number(_entry(reward, reward_key) if reward_key else reward)) is not None
    ]
    return math.fsum(numbers) / len(numbers) if numbers else None
