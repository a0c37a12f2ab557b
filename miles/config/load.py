"""Defaults < recipes, left to right < flags: merged as plain data, validated once, checked, frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from miles.config.checks import CHECKS
from miles.config.command_line import (
    CUSTOM_FILE,
    SERVER_ARGUMENT,
    Given,
    server_argument,
    settable,
    split,
    suggestions,
    unknown_flag,
    value_of,
)
from miles.config.eval_file import EVAL_FILE, read_eval_file, source_name
from miles.config.explain import explain
from miles.config.hook_flags import HookArguments, read_hook_flags
from miles.config.known import run_checks
from miles.config.layers import Layers
from miles.config.recipes import read_mapping
from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.errors import ConfigError, Issue


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a command line says: a configuration, and everything that is wrong with it."""

    config: RunConfig
    """Complete and valid only when there are no issues; settings given wrongly have their defaults."""
    unknown: frozenset[str]
    """Settings that were given, but whose value is not known; checks that need them were skipped."""
    issues: tuple[Issue, ...]


def load(argv: Sequence[str], hook_arguments: HookArguments | None = None) -> RunConfig:
    """The configuration of `[recipe.yaml ...] [--flag value ...]`; looks at no file but the recipes.

    `hook_arguments` gives the `add_arguments` of the rollout and generate functions that the run names, whose values
    go to `custom`. Raises ConfigError with every problem found.
    """
    reading = read(argv, hook_arguments)
    if reading.issues:
        raise ConfigError(list(reading.issues))
    return reading.config


def read(argv: Sequence[str], hook_arguments: HookArguments | None = None) -> Reading:
    """As `load`, but gives the issues beside what could be read."""
    recipes, given = split(argv)
    layers = Layers()
    for recipe in recipes:
        with _Collecting(layers, *(leaf.path for leaf in leaves())):
            layers.add(read_mapping(recipe), recipe)
    unclaimed: list[Given] = []
    for item in given:
        if item.flag == CUSTOM_FILE:
            _add_custom_files(item, layers)
        elif item.flag == EVAL_FILE:
            _add_eval_file(item, layers)
        elif item.flag in settable():
            _put(item, layers)
        elif item.flag.startswith(SERVER_ARGUMENT):
            layers.put("engine.sglang", server_argument(item), item.flag)
        else:
            unclaimed.append(item)
    hook_flags: list[str] = []
    if hook_arguments is not None:
        unclaimed, hook_flags = read_hook_flags(unclaimed, layers, hook_arguments)
    for item in unclaimed:
        layers.issues.append(unknown_flag(item.flag, hook_flags))
        layers.unreadable.update(settable()[f][0].path for f in suggestions(item.flag) if f in settable())
    return _finish(layers)


def resolve(data: Mapping[str, Any]) -> RunConfig:
    """The configuration of plain nested data, validated and checked; raises ConfigError with every problem found."""
    layers = Layers()
    layers.add(data, "the given data")
    reading = _finish(layers)
    if reading.issues:
        raise ConfigError(list(reading.issues))
    return reading.config


class _Collecting:
    """Turns a ConfigError raised inside into issues of the layers."""

    def __init__(self, layers: Layers, *unreadable: str) -> None:
        self._layers, self._unreadable = layers, unreadable

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._layers.issues.extend(error.issues)
        self._layers.unreadable.update(self._unreadable)
        return True


def _put(item: Given, layers: Layers) -> None:
    path = settable()[item.flag][0].path
    layers.unreadable.discard(path)
    with _Collecting(layers, path):
        layers.put(path, value_of(item), item.flag)


def _add_custom_files(item: Given, layers: Layers) -> None:
    if not item.values:
        layers.issues.append(Issue(item.flag, "has no value", "give a YAML file"))
    for path in item.values:
        with _Collecting(layers):
            layers.put("custom", read_mapping(path), path)


def _add_eval_file(item: Given, layers: Layers) -> None:
    if len(item.values) != 1:
        problem = f"takes one file, got {len(item.values)}"
        layers.issues.append(Issue(item.flag, problem, "give a YAML file; it lists as many datasets as you like"))
        layers.unreadable.add("eval.datasets")
        return
    with _Collecting(layers, "eval.datasets"):
        source = item.values[0]
        layers.put("eval.datasets", read_eval_file(source), source_name(source))


def _finish(layers: Layers) -> Reading:
    issues = list(layers.issues)
    unknown = set(layers.unreadable)
    try:
        config = RunConfig.model_validate(layers.data)
    except ValidationError as e:
        wrong = explain(e, layers.origins)
        issues += [issue for _, issue in wrong]
        unknown |= {path for path, _ in wrong}
        config = RunConfig.model_validate(_without(layers.data, {path for path, _ in wrong}))
    issues += run_checks(CHECKS, config, unknown)
    return Reading(config=config, unknown=frozenset(unknown), issues=tuple(issues))


def _without(data: Mapping[str, Any], paths: set[str], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if path not in paths:
            inner = any(p.startswith(f"{path}.") for p in paths)
            kept[key] = _without(cast(Mapping[str, Any], value), paths, f"{path}.") if inner else value
    return kept
