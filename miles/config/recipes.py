"""Recipe files: YAML mappings, read with an error for everything that can be wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from miles.config.nearest import nearest
from miles.errors import ConfigError, Issue


def read_mapping(path: str) -> dict[Any, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises ConfigError when the file is missing, unreadable, no YAML, or holds something else.
    """
    return parse_mapping(path, _read_text(path))


def parse_mapping(path: str, text: str) -> dict[Any, Any]:
    """As `read_mapping`, of text that came from `path`."""
    from miles.config.yaml_text import YamlError, read_yaml

    try:
        data = read_yaml(text)
    except YamlError as e:
        raise _error(path, f"is not valid YAML: {e}", "correct that line") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        fix = "write `section:` lines with indented `name: value` lines"
        raise _error(path, f"holds {a_kind(data)}, not a mapping", fix)
    return cast(dict[Any, Any], data)


def a_kind(value: Any) -> str:
    """What sort of value this is, in words."""
    if value is None:
        return "null"
    words: dict[type[Any], str] = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return words.get(cast(type[Any], type(value)), f"a {type(value).__name__}")


def _read_text(path: str) -> str:
    file = Path(path)
    try:
        raw = file.read_bytes()
    except IsADirectoryError:
        raise _error(path, "is a folder, not a YAML file", "name one of the files in it") from None
    except FileNotFoundError:
        beside = [p.name for p in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        close = nearest(file.name, ((name, str(file.parent / name)) for name in beside))
        fix = f"did you mean {' or '.join(close)}?" if close else f"check the path; the current folder is {Path.cwd()}"
        raise _error(path, "no such file", fix) from None
    except OSError as e:
        raise _error(path, f"cannot be read: {e.strerror}", "check the path and its permissions") from None
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise _error(path, "starts with a byte-order mark", "save it as UTF-8 without BOM")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise _error(path, f"is not UTF-8 text (byte {e.start})", "save it as UTF-8") from None


def _error(path: str, problem: str, fix: str) -> ConfigError:
    return ConfigError([Issue(path or "''", problem, fix)])
