"""What a dynamic sampling filter returns, and how several are asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.core.plugins import describe_error, load_function
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

    Accepts True or False in place of `DynamicFilterOutput`. Raises HookError when the filter raises or returns anything
    else: a text such as "drop" would count as True.
    """
    try:
        verdict = fn(args, group)
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except HookError:
        raise
    except Exception as error:
        raise HookError(path, f"the dynamic filter {describe_error(error)}", "mend the filter") from error
    keep, reason = (verdict.keep, verdict.reason) if isinstance(verdict, DynamicFilterOutput) else (verdict, None)
    if isinstance(keep, bool | np.bool_):
        return DynamicFilterOutput(keep=bool(keep), reason=reason)
    wrong = f"the dynamic filter returned {verdict!r:.80}"
    raise HookError(path, wrong, "return DynamicFilterOutput(keep=...), True or False")
