"""What the installed SGLang is and which server arguments it takes, read from its source: importing it takes a GPU stack."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SERVER_ARGS = Path("srt", "server_args.py")


@dataclass(frozen=True, slots=True)
class InstalledSglang:
    """The SGLang that a run would start."""

    version: str
    flags: frozenset[str]
    """Flags of `sglang serve`, as `--tp-size`; of one argument all spellings."""
    switches: frozenset[str]
    """Those of them that take no value."""


@cache
def installed_sglang() -> InstalledSglang | None:
    """The installed SGLang, or None when there is none or its source is not where it should be."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / SERVER_ARGS
    try:
        flags, switches = read_flags(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    return InstalledSglang(version, frozenset(flags), frozenset(switches))


def read_flags(source: str) -> tuple[set[str], set[str]]:
    """Flags and switches that the source of `server_args.py` declares: fields of `ServerArgs`, and `add_argument` calls."""
    flags: set[str] = set()
    switches: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    names = _names_of_field(field.target.id, field.annotation)
                    flags |= names
                    if _is_switch(field.annotation):
                        switches |= names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = {name for name in map(_text, node.args) if name.startswith("--")}
            flags |= names
            if any(k.arg == "action" and _text(k.value).startswith("store_") for k in node.keywords):
                switches |= names
    return flags, switches


def _names_of_field(name: str, annotation: ast.expr) -> set[str]:
    """`--tp-size` and the aliases that `Arg(aliases=[...])` gives it."""
    names = {f"--{name.replace('_', '-')}"}
    for node in ast.walk(annotation):
        if isinstance(node, ast.keyword) and node.arg == "aliases" and isinstance(node.value, ast.List):
            names |= {alias for alias in map(_text, node.value.elts) if alias.startswith("--")}
    return names


def _is_switch(annotation: ast.expr) -> bool:
    """Whether `Annotated[bool, ...]` or `bool` is the annotation, without a parser of its own."""
    kind = annotation
    if isinstance(annotation, ast.Subscript):
        kind = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
    own = any(isinstance(n, ast.keyword) and n.arg in ("action", "type_parser") for n in ast.walk(annotation))
    return isinstance(kind, ast.Name) and kind.id == "bool" and not own


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
