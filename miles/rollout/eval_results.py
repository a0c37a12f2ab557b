"""`RUN_DIR/eval.jsonl`: what each evaluation found, a line for each dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.utils.tracking_utils.events import JsonLines

SHOWN_ERRORS = 3


def append_results(
    path: Path,
    step: int,
    weight_version: int | None,
    data: Mapping[str, Mapping[str, Any]],
    metrics: Mapping[str, float],
) -> None:
    """Append a line per dataset of `data`: step (-1 before training), dataset, weight version, score, its other metrics.

    `score` is the mean reward, null when nothing was scored; `errors` has the first of the texts of what failed. Of two
    lines of one step and dataset the later holds, as in `metrics.jsonl`. Raises MilesError when it cannot be written.
    """
    lines = JsonLines(path)
    try:
        for name, result in data.items():
            prefix = f"eval/{name}/"
            own = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
            row = {
                "step": step,
                "dataset": name,
                "weight_version": weight_version,
                "score": metrics.get(f"eval/{name}"),
                **own,
            }
            if errors := list(result.get("errors", [])):
                row["errors"] = errors[:SHOWN_ERRORS]
            lines.write(row)
    finally:
        lines.close()
