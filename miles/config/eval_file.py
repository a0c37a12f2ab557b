"""The file of `--eval-config`: evaluation datasets, and defaults that they share."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, cast

from miles.config.nearest import nearest
from miles.config.recipes import a_kind, parse_mapping, read_mapping
from miles.config.schema import EvalDataset
from miles.errors import ConfigError, Issue

EVAL_FILE = "--eval-config"
"""The flag that names the file; what it holds becomes `eval.datasets`."""
BASE64 = "base64:"
_OF_ONE_DATASET = ("name", "path")
_EXAMPLE = "eval: {defaults: {...}, datasets: [{name: NAME, path: FILE.jsonl}]}"


def read_eval_file(source: str) -> list[Any]:
    """Entries of `eval.datasets` from a YAML file, or from `base64:` and its content, each laid over the defaults.

    What the entries themselves hold is validated with all other settings. Raises ConfigError, with everything that is
    wrong, when the file cannot be read, has another form, or holds names that are no settings.
    """
    top = _mapping(source)
    section = top.get("eval")
    where = source_name(source)
    issues = _unknown(top, ("eval",), where, "")
    if not isinstance(section, Mapping):
        raise ConfigError([*issues, Issue(f"{where}: eval", f"is {a_kind(section)}, not a mapping", _EXAMPLE)])
    section = cast("Mapping[str, Any]", section)
    issues += _unknown(section, ("defaults", "datasets"), where, "eval.")
    given: Any = section.get("defaults")
    datasets: Any = section.get("datasets")
    if given is not None and not isinstance(given, Mapping):
        issues.append(Issue(f"{where}: eval.defaults", f"is {a_kind(given)}, not a mapping", _EXAMPLE))
    defaults = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
    shared = [name for name in EvalDataset.model_fields if name not in _OF_ONE_DATASET]
    issues += _unknown(defaults, shared, where, "eval.defaults.")
    if not isinstance(datasets, list) or not datasets:
        found = "is an empty list" if datasets == [] else f"is {a_kind(datasets)}, not a list"
        issues.append(Issue(f"{where}: eval.datasets", found, _EXAMPLE))
    if issues:
        raise ConfigError(issues)
    return [_merged(defaults, entry) for entry in cast("list[Any]", datasets)]


def source_name(source: str) -> str:
    """What messages call the file."""
    return "base64 text" if source.startswith(BASE64) else source


def _merged(defaults: Mapping[str, Any], entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    own = cast("Mapping[str, Any]", entry)
    below = dict(defaults)
    if own.get("rm_type") is not None and "custom_rm_path" not in own:
        below.pop("custom_rm_path", None)
    return {**below, **own}


def _mapping(source: str) -> dict[Any, Any]:
    if not source.startswith(BASE64):
        return read_mapping(source)
    try:
        text = base64.b64decode(source.removeprefix(BASE64), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError) as e:
        fix = "give the file's name, or base64: and what `base64 -w0 FILE` prints"
        raise ConfigError([Issue(EVAL_FILE, f"is not base64 of UTF-8 text: {e}", fix)]) from None
    return parse_mapping(source_name(source), text)


def _unknown(found: Mapping[Any, Any], known: tuple[str, ...] | list[str], where: str, prefix: str) -> list[Issue]:
    issues: list[Issue] = []
    for key in found:
        if key in known:
            continue
        close = nearest(str(key), [(name, name) for name in known])
        fix = f"did you mean {' or '.join(close)}?" if close else f"known here: {', '.join(known)}"
        issues.append(Issue(f"{where}: {prefix}{key}", "no such setting", fix))
    return issues
