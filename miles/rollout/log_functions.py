"""Users' log functions: `--custom-rollout-log-function-path` and `--custom-eval-rollout-log-function-path`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from miles.core.plugins import describe_error, is_async, load_function, maybe_await
from miles.core.ports import Metrics
from miles.errors import HookError, MilesError


class LogFunction:
    """The function at an import path; without one, metrics pass as they are."""

    def __init__(self, path: str | None) -> None:
        self._path = path or ""
        self._function = load_function(path) if path else None

    async def __call__(
        self, *before: Any, defaults: Mapping[str, float], extra: Mapping[str, float], after: tuple[Any, ...] = ()
    ) -> Metrics:
        """Metrics to log: what `extra_metrics` holds after the call, over `defaults` unless the function returned True.

        Called as `fn(*before, extra_metrics, *after)`; a plain function runs in a thread. Raises HookError when it
        fails, or leaves something else than numbers in `extra_metrics`.
        """
        if self._function is None:
            return {**defaults, **extra}
        extra_metrics: dict[str, Any] = dict(extra)
        try:
            if is_async(self._function):
                answer = await self._function(*before, extra_metrics, *after)
            else:
                answer = await maybe_await(await asyncio.to_thread(self._function, *before, extra_metrics, *after))
        except MilesError:
            raise
        except Exception as error:
            raise HookError(self._path, describe_error(error), "mend this function") from error
        if not isinstance(answer, bool | None):
            fix = "return True to leave the usual metrics out, else False"
            raise HookError(self._path, f"returned {type(answer).__name__} {answer!r:.60}", fix)
        return {**({} if answer else defaults), **self._numbers(extra_metrics)}

    def _numbers(self, found: Mapping[str, Any]) -> Metrics:
        numbers: Metrics = {}
        for name, value in found.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError):
                problem = f"left {type(value).__name__} {value!r:.60} in extra_metrics[{name!r}]"
                raise HookError(self._path, problem, "put numbers into it") from None
        return numbers
