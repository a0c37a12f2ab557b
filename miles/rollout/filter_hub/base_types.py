"""What a dynamic sampling filter returns, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.errors import HookError


@dataclass(frozen=True, slots=True)
class DynamicFilterOutput:
    """Whether to keep a group; `reason` becomes part of the metric `rollout/dynamic_filter/drop_REASON`."""

    keep: bool
    reason: str | None = None


async def call_dynamic_filter(fn: Callable[..., Any] | None, path: str, args: Any, group: Any) -> DynamicFilterOutput:
    """Ask the filter about one finished group; without a filter every group is kept.

    Accepts a plain truth value in place of `DynamicFilterOutput`. Raises HookError when the filter raises or returns
    something without a truth value.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    try:
        verdict = fn(args, group)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        if isinstance(verdict, DynamicFilterOutput):
            return DynamicFilterOutput(keep=bool(verdict.keep), reason=verdict.reason)
        if verdict is not None:
            return DynamicFilterOutput(keep=bool(verdict))
    except HookError:
        raise
    except Exception as error:
        raise HookError(
            path, f"the dynamic filter raised {type(error).__name__}: {error}", "mend the filter"
        ) from error
    raise HookError(path, "the dynamic filter returned None", "return DynamicFilterOutput(keep=...), True or False")
