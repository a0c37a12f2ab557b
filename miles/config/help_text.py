"""The text of `--help`."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from miles.config.command_line import CUSTOM_FILE
from miles.config.eval_file import EVAL_FILE
from miles.config.walk import Leaf, item_leaves, leaves, sections

USAGE = "usage: {prog} [recipe.yaml ...] [--flag value ...]"
RULES = (
    "Defaults < recipes, left to right < flags; of a flag given twice the last counts.",
    "`--flag a b c` fills a list. A switch alone means true. `--flag=VALUE` takes values that start with two dashes.",
    "`null` unsets a setting that may be unset. A recipe holds the dotted names as nested YAML.",
)
GENERAL = (
    ("--help", "Show this text."),
    ("--dry-run", "Show the resolved settings, the batch arithmetic and what would be started; start nothing."),
    (f"{CUSTOM_FILE} FILE.yaml", "Add the entries of a YAML mapping to `custom`, for your own functions."),
    (
        f"{EVAL_FILE} FILE.yaml",
        "Take `eval.datasets` and their defaults from a YAML file, or from base64:TEXT of one.",
    ),
)


def help_text(prog: str = "train.py") -> str:
    """All flags by section, with choices, bounds and defaults."""
    lines = [USAGE.format(prog=prog), "", *RULES, ""]
    for flag, text in GENERAL:
        lines += [f"  {flag}", *_wrapped(text)]
    for section, doc in sections().items():
        lines += ["", f"{section}: {doc}"]
        for leaf in leaves():
            if leaf.section == section:
                lines += [f"  {', '.join([*reversed(leaf.flags), *leaf.inverted])} {metavar(leaf)}".rstrip()]
                entries = ", ".join(item.path for item in item_leaves(leaf))
                doc = f"{leaf.doc} Each has: {entries}." if entries else leaf.doc
                lines += _wrapped(f"{doc} [{limits(leaf)}]")
    return "\n".join(lines) + "\n"


def metavar(leaf: Leaf) -> str:
    """What follows the flag: its choices, or a word for its type."""
    if leaf.choices:
        return "{" + ",".join(leaf.choices) + "}"
    word = {"int": "INT", "float": "NUMBER", "str": "TEXT", "bool": "", "dict": "JSON"}.get(leaf.item_type, "JSON")
    return f"{word} ..." if leaf.is_list else word


def limits(leaf: Leaf) -> str:
    """Bounds and default: `1 or more; default 32`."""
    return "; ".join(part for part in (leaf.bounds, f"default {shown(leaf.default)}") if part)


def shown(value: Any) -> str:
    """A default as people write it."""
    if value is None:
        return "unset"
    if isinstance(value, str):
        return value or "unset"
    return json.dumps(value)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=112, initial_indent=" " * 6, subsequent_indent=" " * 6)
