"""The first row of each JSON Lines file of prompts, looked at before anything starts: the usual slip is a key's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.config.nearest import nearest
from miles.config.schema import DataConfig, RunConfig
from miles.errors import DataError, Issue
from miles.utils.jsonl import read_jsonl, split_slice


def first_rows_fit(cfg: RunConfig) -> Iterator[Issue]:
    """Files whose first row is no JSON object, or lacks `--input-key` or `--label-key`; the run itself reads all rows."""
    if cfg.data.source_path != DataConfig.model_fields["source_path"].default:
        return
    keys = {"data.input_key": cfg.data.input_key, "data.label_key": cfg.data.label_key}
    for text in cfg.data.prompt_data:
        path, rows = split_slice(text)
        if path.endswith(".jsonl") and Path(path).is_file() and not rows.start:
            yield from _first_row(path, {setting: key for setting, key in keys.items() if key is not None})


def _first_row(path: str, keys: dict[str, str]) -> Iterator[Issue]:
    try:
        line, row = next(read_jsonl(path), (0, None))
    except DataError as error:
        where = path if error.line is None else f"{path}:{error.line}"
        yield Issue("data.prompt_data", f"{where}: {error.problem}", error.fix)
        return
    for setting, key in keys.items():
        if row is not None and key not in row:
            yield _missing(setting, key, f"{path}:{line}", row)


def _missing(setting: str, key: str, where: str, row: dict[str, Any]) -> Issue:
    flag = f"--{setting.partition('.')[2].replace('_', '-')}"
    close = nearest(key, [(known, known) for known in row])
    fix = f"did you mean {flag} {' or '.join(close)}?" if close else f"name one of them with {flag}"
    return Issue(setting, f"{where}: the row has no {key!r}, only {', '.join(map(repr, row)) or 'no key'}", fix)
