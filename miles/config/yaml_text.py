"""YAML text to plain data and back, without YAML's two traps: `1e-6` is a number, and a key given twice is an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import yaml

if TYPE_CHECKING:
    from yaml import SafeDumper, SafeLoader
elif yaml.__with_libyaml__:
    from yaml import CSafeDumper as SafeDumper
    from yaml import CSafeLoader as SafeLoader
else:
    from yaml import SafeDumper, SafeLoader


class YamlError(ValueError):
    """Text that is not the YAML we take; the message has line and column."""


class _Loader(SafeLoader):
    pass


class _Dumper(SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):
    cast(Any, _kind).add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """Parse one YAML document.

    Raises YamlError with line and column when it is not YAML, or when a mapping has a key twice.
    """
    loader: Any = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated_keys(node, set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as e:
        tab = e.problem_mark is not None and _indented_by_tab(text, e.problem_mark.line)
        hint = "; indent with spaces, not tabs" if tab else ""
        raise YamlError(f"{_place(e.problem_mark)}: {e.problem or e.context}{hint}") from None
    except (yaml.YAMLError, ValueError) as e:
        raise YamlError(" ".join(str(e).split())) from None
    finally:
        loader.dispose()


def write_yaml(data: Any) -> str:
    """Plain data as YAML that `read_yaml` reads back to equal data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=119)


def _refuse_repeated_keys(node: yaml.Node, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, seen)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise YamlError(f"{_place(key.start_mark)}: the key {key.value} is given twice")
            keys.add(str(key.value))
            _refuse_repeated_keys(value, seen)


def _indented_by_tab(text: str, line: int) -> bool:
    row = [*text.split("\n"), ""][line]
    return "\t" in row[: len(row) - len(row.lstrip())]


def _place(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
