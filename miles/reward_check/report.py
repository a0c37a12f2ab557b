"""What `miles reward check` prints, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from miles.core.samples import Sample
from miles.reward_check.compare import Graded, mean
from miles.reward_check.options import Options

_END = 160


def result(options: Options, graded: Sequence[Graded], seconds: float, metrics: dict[str, float]) -> dict[str, Any]:
    """Counts, means and every difference and error, ready for JSON."""
    key = options.config.reward.reward_key
    compared = [g for g in graded if g.is_compared]
    slowest = max(graded, key=lambda g: g.seconds)
    return {
        "file": options.path,
        "reward": reward_name(options),
        "samples": len(graded),
        "errors": sum(g.error is not None for g in graded),
        "compared": len(compared),
        "differences": sum(g.differs for g in graded),
        "stored_mean": mean([g.saved.stored for g in compared], key),
        "now_mean": mean([g.now for g in compared], key),
        "now_mean_of_all": mean([g.now for g in graded if g.error is None], key),
        "seconds": seconds,
        "per_second": len(graded) / seconds,
        "slowest": {"where": slowest.saved.where, "seconds": slowest.seconds},
        "metrics": metrics,
        "found": [_row(g) for g in graded if g.differs or g.error is not None],
    }


def reward_name(options: Options) -> str:
    """The reward of the run, in words."""
    reward = options.config.reward
    if reward.custom_rm_path is not None:
        return f"--custom-rm-path {reward.custom_rm_path}" + (" --group-rm" if reward.group_rm else "")
    return "the rm_type of each row" if reward.rm_type is None else f"--rm-type {reward.rm_type}"


def text(found: dict[str, Any], show: int) -> str:
    """The result for people; `show` differences and errors in full."""
    lines = [
        f"{found['file']}: {found['samples']} samples, graded by {found['reward']}",
        f"  speed     {found['per_second']:.0f} samples/s: {found['seconds']:.2f} s, the slowest "
        f"{found['slowest']['seconds'] * 1000:.1f} ms ({found['slowest']['where']})",
        f"  mean      stored {_number(found['stored_mean'])}, now {_number(found['now_mean'])}, of the "
        f"{found['compared']} that have both" + _of_all(found),
        f"  errors    {found['errors']}",
        f"  differ    {found['differences']} of {found['compared']}",
        *(f"  {name.rpartition('/')[2]} {value:g}" for name, value in found["metrics"].items() if value),
    ]
    for row in found["found"][:show]:
        lines += ["", *_shown(row)]
    if len(found["found"]) > show:
        lines += ["", f"{len(found['found']) - show} more; --show N prints more, --json FILE writes all"]
    return "\n".join(lines) + "\n"


def _of_all(found: dict[str, Any]) -> str:
    without = found["samples"] - found["errors"] - found["compared"]
    return f"; {without} have none stored, and all of now are {_number(found['now_mean_of_all'])}" if without else ""


def _shown(row: dict[str, Any]) -> list[str]:
    head = [
        row["where"],
        f"  prompt    {row['prompt_end']}",
        f"  response  {row['response_end']}",
        f"  label     {row['label']}",
    ]
    if row["error"] is not None:
        return [*head, f"  stored {_shortly(row['stored'])}, now an error: {row['error']}"]
    return [*head, f"  stored {_shortly(row['stored'])}, now {_shortly(row['now'])}"]


def _row(graded: Graded) -> dict[str, Any]:
    sample: Sample = graded.saved.sample
    return {
        "where": graded.saved.where,
        "prompt_end": _end(sample.prompt_text),
        "response_end": _end(sample.response),
        "label": _shortly(sample.label),
        "stored": graded.saved.stored,
        "now": graded.now,
        "error": graded.error,
    }


def _end(text: str) -> str:
    shown = json.dumps(text[-_END:], ensure_ascii=False)
    return shown if len(text) <= _END else f"...{shown}"


def _shortly(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= _END else f"{shown[:_END]}..."


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
