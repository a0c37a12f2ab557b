"""The command line as plain data: recipe files, then flags with their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from miles.config.eval_file import EVAL_FILE
from miles.config.nearest import nearest
from miles.config.walk import Leaf, leaves
from miles.errors import ConfigError, Issue

CUSTOM_FILE = "--custom-config-path"
"""A flag with a value that is no setting: a YAML file merged into `custom`."""

SERVER_ARGUMENT = "--sglang-"
"""What server arguments of SGLang begin with; its own source says which there are."""


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as it stands on the command line, with the words that follow it up to the next flag."""

    flag: str
    values: tuple[str, ...]


def split(argv: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Recipe files and flags of `argv`; `--flag=value` and `--flag value` are the same."""
    first = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    recipes, rest = list(argv[:first]), list(argv[first:])
    given: list[Given] = []
    while rest:
        flag, eq, value = rest.pop(0).partition("=")
        values = [value] if eq else []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        given.append(Given(flag, tuple(values)))
    return recipes, given


@cache
def settable() -> dict[str, tuple[Leaf, bool]]:
    """The setting behind every flag, and whether the flag is an inverted one."""
    plain = {flag: (leaf, False) for leaf in leaves() for flag in leaf.flags}
    return plain | {flag: (leaf, True) for leaf in leaves() for flag in leaf.inverted}


def value_of(given: Given) -> Any:
    """The plain value that a known flag gives to its setting; words stay text, since the schema parses them by type.

    `null` unsets an optional setting. Raises ConfigError when the number or form of the values is wrong.
    """
    leaf, inverted = settable()[given.flag]
    if leaf.type_name == "bool":
        return _switch(given) != inverted
    if leaf.is_list:
        plain = leaf.item_type in ("int", "float", "str")
        return list(given.values) if plain else [_structure(given.flag, v) for v in given.values]
    if len(given.values) != 1:
        found = f"takes one value, got {len(given.values)}: {' '.join(given.values)}"
        raise _error(given.flag, found if given.values else "has no value", _give(leaf, given.values))
    if leaf.optional and given.values[0] == "null":
        return None
    return _structure(given.flag, given.values[0]) if leaf.type_name == "dict" else given.values[0]


def server_argument(given: Given) -> dict[str, Any]:
    """`{"tp_size": "2"}` of `--sglang-tp-size 2`: no value is a switch that is on, several are a list."""
    name = given.flag.removeprefix(SERVER_ARGUMENT).replace("-", "_")
    value = True if not given.values else given.values[0] if len(given.values) == 1 else list(given.values)
    return {name: value}


def unknown_flag(flag: str, more: Iterable[str] = ()) -> Issue:
    """The issue of a flag that nothing takes, with the nearest ones; `more` are flags of the run's own functions."""
    close = suggestions(flag, more)
    return Issue(
        flag or "''", "no such flag", f"did you mean {' or '.join(close)}?" if close else "see --help for all flags"
    )


def suggestions(flag: str, more: Iterable[str] = ()) -> list[str]:
    """Flags that exist and look like `flag`."""
    known = [(name, name if inverted else leaf.flag) for name, (leaf, inverted) in settable().items()]
    return nearest(flag, [*known, *((name, name) for name in (CUSTOM_FILE, EVAL_FILE, "--help", "--dry-run", *more))])


def _switch(given: Given) -> bool:
    if not given.values:
        return True
    value = {"true": True, "false": False}.get(given.values[0].lower())
    if value is None or len(given.values) > 1:
        fix = "give true or false, or nothing, which means true"
        raise _error(given.flag, f"got {' '.join(map(repr, given.values))}", _give_order(given.values) or fix)
    return value


def _give(leaf: Leaf, values: tuple[str, ...]) -> str:
    return (_give_order(values) if values else "") or f"give {leaf.wants}"


def _give_order(values: tuple[str, ...]) -> str:
    recipes = [v for v in values if v.endswith((".yaml", ".yml"))]
    return f"put {' '.join(recipes)} before the first flag: recipes come first" if recipes else ""


def _structure(flag: str, text: str) -> dict[Any, Any]:
    from miles.config.yaml_text import YamlError, read_yaml

    fix = """give a mapping as JSON or YAML: '{"name": "value"}'"""
    try:
        data = read_yaml(text)
    except YamlError as e:
        raise _error(flag, f"got {text!r}: {e}", fix) from None
    if not isinstance(data, dict):
        raise _error(flag, f"got {text!r}", fix)
    return cast(dict[Any, Any], data)


def _error(flag: str, problem: str, fix: str) -> ConfigError:
    return ConfigError([Issue(flag, problem, fix)])
