"""What the installed SGLang is and which server arguments it takes, read from its source: importing it takes a GPU stack."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SERVER_ARGS = Path("srt", "server_args.py")
FIRST, BELOW = (0, 5, 17), (0, 6)
SUPPORTED = f">={'.'.join(map(str, FIRST))},<{'.'.join(map(str, BELOW))}"
"""Versions that Miles works with, as the extra `sglang` asks for them."""


@dataclass(frozen=True, slots=True)
class InstalledSglang:
    """The SGLang that a run would start."""

    version: str
    flags: frozenset[str]
    """Flags of `sglang serve`, as `--tp-size`; of one argument all spellings."""


@cache
def installed_sglang() -> InstalledSglang | None:
    """The installed SGLang, or None when there is none or its source is not where it should be."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / SERVER_ARGS
    try:
        flags = read_flags(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    return InstalledSglang(version, frozenset(flags))


def is_supported(version: str) -> bool:
    """Whether `version` is within `SUPPORTED`; one that has no number, as of a checkout, counts as supported."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    if numbers is None:
        return True
    found = tuple(map(int, numbers[0].split(".")))
    early = found == FIRST and re.match(r"\.?(dev|a|b|rc)", version[numbers.end() :]) is not None
    return FIRST <= found < BELOW and not early


def read_flags(source: str) -> set[str]:
    """Flags that the source of `server_args.py` declares: fields of `ServerArgs`, and `add_argument` calls."""
    flags: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    flags |= _names_of_field(field.target.id, field.annotation)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags |= {name for name in map(_text, node.args) if name.startswith("--")}
    return flags


def _names_of_field(name: str, annotation: ast.expr) -> set[str]:
    """`--tp-size` and the aliases that `Arg(aliases=[...])` gives it."""
    names = {f"--{name.replace('_', '-')}"}
    for node in ast.walk(annotation):
        if isinstance(node, ast.keyword) and node.arg == "aliases" and isinstance(node.value, ast.List):
            names |= {alias for alias in map(_text, node.value.elts) if alias.startswith("--")}
    return names


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
