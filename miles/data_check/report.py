"""What was found, as data and as text."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from miles.data_check.scan import Found

WIDTH = 110
_SHOWN = 1500


def result(found: Found, labels_checked: int | None) -> dict[str, Any]:
    """What is in one file, JSON-ready; `labels_checked` is the number of distinct labels that were graded against."""
    duplicates, pairs = found.duplicates()
    return {
        "path": found.path,
        "rows": found.rows,
        "keys": {
            name: {"types": dict(key.types), "missing": found.rows - key.present} for name, key in found.keys.items()
        },
        "lengths": _lengths(found.lengths),
        "dropped": found.dropped,
        "duplicates": duplicates,
        "duplicate_lines": [list(pair) for pair in pairs],
        "label_types": dict(found.label_types),
        "distinct_labels": len(found.labels),
        "labels_checked": labels_checked,
        "prompts": [{"line": line, "text": text} for line, text in found.examples],
        "num_problems": found.num_problems,
        "problems": found.problems,
    }


def _lengths(lengths: Sequence[int]) -> dict[str, float] | None:
    if not len(lengths):
        return None
    values = np.asarray(lengths)
    median, p95 = np.percentile(values, [50, 95])
    return {"min": int(values.min()), "median": float(median), "p95": float(p95), "max": int(values.max())}


def text(results: Sequence[Mapping[str, Any]], show: int, has_tokenizer: bool) -> str:
    """The report of all files."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, color_system=None)
    for one in results:
        _write(console, one, has_tokenizer)
        for problem in one["problems"][:show]:
            console.print(f"  {problem}", markup=False, soft_wrap=True)
        if one["num_problems"] > show:
            console.print(f"  ... and {one['num_problems'] - show} more (--show N prints more)")
    return out.getvalue()


def _write(console: Console, one: Mapping[str, Any], has_tokenizer: bool) -> None:
    console.print(f"{one['path']}: {one['rows']:,} rows", markup=False, soft_wrap=True)
    table = Table("key", "types", "rows without it", box=None, pad_edge=True)
    table.columns[2].justify = "right"
    for name, key in one["keys"].items():
        types = ", ".join(
            f"{kind} {count:,}" if len(key["types"]) > 1 else kind for kind, count in key["types"].items()
        )
        table.add_row(_printable(name), types, f"{key['missing']:,}")
    console.print(table)
    for name, value in _lines(one, has_tokenizer):
        console.print(f"  {name:<11} {value}", markup=False, soft_wrap=True)
    for prompt in one["prompts"]:
        shown = prompt["text"] if len(prompt["text"]) <= _SHOWN else prompt["text"][:_SHOWN] + " ..."
        console.print(f"  prompt of line {prompt['line']}:", markup=False)
        for line in shown.split("\n"):
            console.print(f"    | {line}", markup=False, soft_wrap=True)
    verdict = f"{one['num_problems']:,} rows that a run would refuse" if one["num_problems"] else "none"
    console.print(f"  problems    {verdict}")


def _lines(one: Mapping[str, Any], has_tokenizer: bool) -> list[tuple[str, str]]:
    lengths, rows = one["lengths"], one["rows"]
    if lengths:
        words = "  ".join(f"{name} {value:,.0f}" for name, value in lengths.items())
        lines = [("tokens", words), ("dropped", f"{one['dropped']:,} of {rows:,} are too long")]
    else:
        lines = [("tokens", "none" if has_tokenizer else "not known: --hf-checkpoint FOLDER names a tokenizer")]
    pairs = ", ".join(f"line {again} is line {first}" for first, again in one["duplicate_lines"])
    lines.append(("duplicates", f"{one['duplicates']:,} prompts again{f': {pairs}' if pairs else ''}"))
    if one["label_types"]:
        types = ", ".join(f"{kind} {count:,}" for kind, count in one["label_types"].items())
        if one["labels_checked"] is not None:
            types += f"; {one['labels_checked']:,} of {one['distinct_labels']:,} distinct ones graded against"
        lines.append(("labels", types))
    return lines


def _printable(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]
