"""Layers of plain data laid over each other by the shape of the schema, with a record of who set what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from miles.config.nearest import nearest
from miles.config.recipes import a_kind
from miles.config.schema import RunConfig
from miles.config.walk import leaves, section_model
from miles.errors import Issue

OPEN = ("custom", "engine.sglang")
"""Mappings with names of others: they merge by name."""


class Layers:
    """Settings as plain data. Sections and `OPEN` mappings merge by name, any other value replaces the one below it."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        """Where each setting was last given: a recipe's path, or a flag."""
        self.issues: list[Issue] = []
        self.unreadable: set[str] = set()
        """Settings that were given, but whose value is not known."""

    def add(self, more: Mapping[Any, Any], origin: str) -> None:
        """Lay a recipe over what is there."""
        self._add(more, origin, self.data, RunConfig, "")

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set one setting."""
        *parents, last = path.split(".")
        into = self.data
        for parent in parents:
            into = into.setdefault(parent, {})
        self._set(into, path, last, value, origin)

    def _add(
        self, more: Mapping[Any, Any], origin: str, into: dict[str, Any], model: type[BaseModel], prefix: str
    ) -> None:
        for key, value in more.items():
            path = f"{prefix}{key}"
            field = model.model_fields.get(key) if isinstance(key, str) else None
            if field is None:
                self._unknown(path, origin, model, prefix)
                continue
            nested = section_model(field)
            if nested is None:
                self._set(into, path, key, value, origin)
            elif isinstance(value, Mapping):
                section = cast(Mapping[Any, Any], value)
                self._add(section, origin, into.setdefault(key, {}), nested, f"{path}.")
            elif value is not None:
                lost = {leaf.path for leaf in leaves() if leaf.section == path}
                self._no_section(path, origin, value, next(iter(nested.model_fields)), lost)

    def _set(self, into: dict[str, Any], path: str, key: str, value: Any, origin: str) -> None:
        if path in OPEN:
            if isinstance(value, Mapping):
                into[key] = {**into.get(key, {}), **cast(Mapping[Any, Any], value)}
                self.origins[path] = origin
            elif value is not None:
                self._no_section(path, origin, value, "name", {path})
            return
        self.origins[path] = origin
        into[key] = value

    def _no_section(self, path: str, origin: str, value: Any, example: str, lost: set[str]) -> None:
        fix = f"write its settings below it, such as `{path}: {{{example}: ...}}`"
        self.issues.append(Issue(path, f"is a section, but {origin} gives it {a_kind(value)}", fix))
        self.unreadable |= lost

    def _unknown(self, path: str, origin: str, model: type[BaseModel], prefix: str) -> None:
        by_path = {leaf.path: leaf for leaf in leaves()}
        if path in by_path:
            section, _, name = path.partition(".")
            fix = f"nest it: `{section}: {{{name}: ...}}`"
        else:
            siblings = [(f"{prefix}{name}", f"{prefix}{name}") for name in model.model_fields]
            names = [(spelling, leaf.path) for leaf in leaves() for spelling in (leaf.path, leaf.attribute)]
            close = nearest(path, [*siblings, *names])
            fix = f"did you mean {' or '.join(close)}?" if close else f"known here: {', '.join(model.model_fields)}"
            self.unreadable.update(close)
        self.issues.append(Issue(path, f"no such setting (in {origin})", fix))
