"""Checks over a configuration of which some settings may be unknown because they were given wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, cast

from miles.config.base import ConfigModel
from miles.config.schema import RunConfig
from miles.errors import Issue

Check = Callable[[RunConfig], Iterator[Issue]]
"""A rule over the whole configuration; yields an issue for each way in which it is broken."""


class _UnknownSettingError(Exception):
    """A check read a setting that was given, but wrongly."""


class _Known:
    """A configuration whose `unknown` settings, by dotted path, cannot be read."""

    def __init__(self, model: ConfigModel, unknown: Set[str], prefix: str = "") -> None:
        self._model, self._unknown, self._prefix = model, unknown, prefix

    def __getattr__(self, name: str) -> Any:
        path = f"{self._prefix}{name}"
        if path in self._unknown:
            raise _UnknownSettingError(path)
        value = getattr(self._model, name)
        return _Known(value, self._unknown, f"{path}.") if isinstance(value, ConfigModel) else value


def run_checks(checks: Sequence[Check], cfg: RunConfig, unknown: Set[str] = frozenset()) -> list[Issue]:
    """Issues of all `checks`; one that reads an `unknown` setting is skipped from there on."""
    readable = cast(RunConfig, _Known(cfg, unknown)) if unknown else cfg
    issues: list[Issue] = []
    for check in checks:
        try:
            for issue in check(readable):
                issues.append(issue)  # noqa: PERF402 - what was found before an unknown setting stays
        except _UnknownSettingError:
            continue
    return issues
