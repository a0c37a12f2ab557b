"""What a dynamic sampling filter returns, and how several are asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.errors import HookError


@dataclass(frozen=True, slots=True)
class DynamicFilterOutput:
    """Whether to keep a group; `reason` becomes part of the metric `rollout/dynamic_filter/drop_REASON`."""

    keep: bool
    reason: str | None = None


class DynamicFilters:
    """The filters of `--dynamic-sampling-filter-path`, asked in order; the first that drops a group decides.

    Without filters every group is kept. Raises HookError when a path does not import.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        from miles.core.plugins import load_function

        self.paths = tuple(paths)
        self._filters: list[tuple[str, Callable[..., Any]]] = [(path, load_function(path)) for path in paths]

    async def judge(self, args: Any, group: Any) -> DynamicFilterOutput:
        """Whether to keep one finished group; a dropped one has a reason."""
        for path, fn in self._filters:
            verdict = await call_dynamic_filter(fn, path, args, group)
            if not verdict.keep:
                return DynamicFilterOutput(keep=False, reason=verdict.reason or "filtered")
        return DynamicFilterOutput(keep=True)


async def call_dynamic_filter(fn: Callable[..., Any], path: str, args: Any, group: Any) -> DynamicFilterOutput:
    """Ask one filter about one finished group.

    Accepts a plain truth value in place of `DynamicFilterOutput`. Raises HookError when the filter raises or returns
    something without a truth value.
    """
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
