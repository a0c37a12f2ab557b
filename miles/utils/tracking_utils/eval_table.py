"""Results of an evaluation as a table for people."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "eval/"
COLUMNS = (
    ("prompts", "num_prompts", ".0f"),
    ("samples", "num_samples", ".0f"),
    ("failed", "failed", ".0f"),
    ("unscored", "unscored", ".0f"),
    ("truncated", "truncated_ratio", ".1%"),
    ("mean len", "response_len/mean", ".1f"),
    ("p95 len", "response_len/p95", ".1f"),
)


def eval_table(metrics: Mapping[str, float]) -> list[str]:
    """Lines of a table with a row for each dataset in `metrics`; `-` where something is not defined."""
    names = list(dict.fromkeys(key.split("/")[1] for key in metrics if key.startswith(PREFIX)))
    passes = sorted(
        {int(key.rpartition("/pass@")[2]) for key in metrics if key.startswith(PREFIX) and "/pass@" in key}
    )
    columns = [("score", "", ".4f"), *((f"pass@{k}", f"pass@{k}", ".4f") for k in passes), *COLUMNS]
    rows = [["dataset", *(title for title, _, _ in columns)]]
    for name in names:
        cells = [metrics.get(f"{PREFIX}{name}/{key}".rstrip("/")) for _, key, _ in columns]
        shown = [
            "-" if value is None else format(value, form) for value, (_, _, form) in zip(cells, columns, strict=True)
        ]
        rows.append([name, *shown])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
