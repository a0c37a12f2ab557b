"""Pydantic's findings in the words of the command line and the recipes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from miles.config.nearest import nearest
from miles.config.walk import Leaf, item_leaves, leaves
from miles.errors import Issue

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


def explain(error: ValidationError, origins: Mapping[str, str]) -> list[tuple[str, Issue]]:
    """The setting and the issue of each finding; `origins` says which recipe or flag gave a setting."""
    by_path = {leaf.path: leaf for leaf in leaves()}
    found: list[tuple[str, Issue]] = []
    for detail in error.errors(include_url=False):
        steps = [str(step) for step in detail["loc"]]
        depth = next(n for n in range(len(steps), 0, -1) if ".".join(steps[:n]) in by_path)
        leaf = by_path[".".join(steps[:depth])]
        found.append((leaf.path, _issue(detail, leaf, steps[depth:], origins.get(leaf.path, ""))))
    return found


def _issue(detail: ErrorDetails, leaf: Leaf, inside: list[str], origin: str) -> Issue:
    flag = origin.startswith("--")
    path = ".".join([origin if flag else leaf.path, *inside])
    where = "" if flag or not origin else f" in {origin}"
    wanted = leaf
    known = {field.path: field for field in item_leaves(leaf)}
    if known and inside:
        if detail["type"] == "extra_forbidden":
            close = nearest(inside[-1], ((name, name) for name in known))
            fix = f"did you mean {' or '.join(close)}?" if close else f"known here: {', '.join(known)}"
            return Issue(path, f"no such setting{where}", fix)
        if detail["type"] == "missing":
            return Issue(path, f"is missing{where}", f"add `{inside[-1]}: ...`, {known[inside[-1]].wants}")
        wanted = known.get(inside[-1], leaf)
    if inside and inside[-1] == "[key]":
        return Issue(leaf.path, f"has the name {detail['input']!r}{where}", "names are text: put it in quotes")
    value = cast(object, detail["input"])
    fix = f"give {wanted.wants}"
    if wanted.item_type == "str" and not wanted.choices and isinstance(value, int | float | datetime.date):
        fix += f': put it in quotes, as in "{_shown(value).strip(chr(39))}"'
    return Issue(path, f"got {_shown(value)}{where}", fix)


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return str(value) if isinstance(value, datetime.date) else repr(value)
