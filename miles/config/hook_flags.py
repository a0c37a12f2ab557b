"""Flags that a run's own functions declare with `add_arguments(parser)`; their values go to `custom`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from miles.config.command_line import Given, settable
from miles.config.layers import Layers
from miles.config.schema import RolloutConfig
from miles.errors import Issue, MilesError

AddArguments = Callable[[argparse.ArgumentParser], None]
HookArguments = Callable[[str], AddArguments | None]
"""Gives the `add_arguments` of the function at an import path, or None when it has none; may raise MilesError."""


def read_hook_flags(
    unclaimed: Sequence[Given], layers: Layers, hook_arguments: HookArguments
) -> tuple[list[Given], list[str]]:
    """Let the rollout and generate functions that the run names take what is theirs of the `unclaimed` flags.

    Stores all that they declare, defaults too, in `custom`, where a recipe's value wins over a default and a flag over
    both. Problems become issues of `layers`. Returns the flags that are still nobody's, and all flags declared.
    """
    rest, declared = list(unclaimed), list[str]()
    for path in _named(layers):
        try:
            add_arguments = hook_arguments(path)
        except MilesError as e:
            problem, _, fix = str(e).removeprefix(f"{path}: ").partition("\n    fix: ")
            layers.issues.append(Issue(path, problem, fix or "correct the function, or its path"))
            continue
        if add_arguments is not None:
            parser = _Parser(prog=path, add_help=False, allow_abbrev=False)
            rest = _take(path, parser, add_arguments, rest, layers)
            declared += parser.flags()
    return rest, declared


class _WrongFlagsError(Exception):
    """The flags given to a user's function are not those it declares."""


class _Parser(argparse.ArgumentParser):
    """A parser of one function's flags that raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise _WrongFlagsError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _WrongFlagsError((message or "its flags end the program").strip())

    def flags(self) -> list[str]:
        """All flags declared so far."""
        return list(self._option_string_actions)

    def take_as_given(self, values: Mapping[str, Any]) -> None:
        """Let `values` stand in for flags that are not given."""
        self.set_defaults(**values)
        for action in self._actions:
            action.required = action.required and action.dest not in values


def _named(layers: Layers) -> list[str]:
    """Import paths of the functions that may declare flags, but for the defaults."""
    section = layers.data.get("rollout", {})
    paths: list[str] = []
    for name in ("function_path", "custom_generate_function_path"):
        path = section.get(name)
        if isinstance(path, str) and path not in ("", RolloutConfig.model_fields[name].default, *paths):
            paths.append(path)
    return paths


def _take(path: str, parser: _Parser, add_arguments: AddArguments, given: list[Given], layers: Layers) -> list[Given]:
    try:
        add_arguments(parser)
    except Exception as e:  # noqa: BLE001 - a user's function may raise anything, and the raise becomes an issue
        problem = f"its add_arguments raised {type(e).__name__}: {e}"
        layers.issues.append(Issue(path, problem, "declare each flag once, with parser.add_argument"))
        return given
    taken = [flag for flag in parser.flags() if flag in settable()]
    if taken:
        problem = f"its add_arguments declares {', '.join(taken)}, which Miles has"
        layers.issues.append(Issue(path, problem, "rename it, or read the setting from args"))
    before: dict[Any, Any] = layers.data.get("custom", {})
    parser.take_as_given({k: v for k, v in before.items() if isinstance(k, str)})
    mine = [g for g in given if g.flag in parser.flags()]
    try:
        values = vars(parser.parse_args([word for g in mine for word in _words(g)]))
    except _WrongFlagsError as e:
        layers.issues.append(Issue(path, str(e), f"give its flags as it declares them: {' '.join(parser.flags())}"))
    else:
        layers.put("custom", {**before, **values}, path)
    return [g for g in given if g not in mine]


def _words(given: Given) -> list[str]:
    """A lone value is joined to its flag, so that one that starts with a dash stays a value."""
    return [f"{given.flag}={given.values[0]}"] if len(given.values) == 1 else [given.flag, *given.values]
