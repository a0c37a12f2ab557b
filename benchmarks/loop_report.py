"""From the files of a benchmarked run to its figures: phases of a step, Miles against the bare engine, updates, the start."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Rows = Mapping[int, Mapping[str, Any]]
"""Metrics by step; what was published after a step is in that step's row, the first publish in row -1."""

PHASES: dict[str, str] = {
    "generate": "perf/generate_time",
    "  Miles's rollout function": "bench/miles_s",
    "train": "perf/train_time",
    "  log-probs": "perf/log_probs_time",
    "  optimizer step": "perf/actor_train_time",
}
PUBLISH: dict[str, str] = {
    "publish": "perf/update_weights_time",
    "  sending": "perf/update_weights_send_time",
    "  proof": "perf/verify_weights_time",
}
SHARE_OF_RAW, TRAIN_SHARE, ALLOWANCE_S, PEAK = 0.95, 0.36, 0.5, 989e12
"""The bar for a whole step: what the bare engine takes over 0.95, the operations of training at 36 % of 989 TFLOP/s, half
a second for everything else."""


def read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """Rows of `metrics.jsonl`, joined by step; `time` is that of the row with the train step, in seconds since 1970."""
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        known = rows.setdefault(row["step"], {})
        if "perf/train_time" not in row and "time" in known:
            del row["time"]
        known.update(row)
    return rows


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least, most and number of `values`."""
    found = list(values)
    return {
        "median": round(statistics.median(found), 4),
        "least": round(min(found), 4),
        "most": round(max(found), 4),
        "repeats": len(found),
    }


def whole_steps(rows: Rows, first: int) -> list[int]:
    """Steps from `first` on whose time from the train step before to their own holds nothing but the loop's phases."""
    return [
        step
        for step in sorted(rows)
        if step >= first and "perf/step_time" in rows[step] and "perf/update_weights_time" in rows.get(step - 1, {})
    ]


def phase_table(rows: Rows, steps: list[int]) -> dict[str, dict[str, float]]:
    """Seconds of each phase over `steps`. `gaps` is what no phase claims; the publish of a step is the one before it."""

    def over(value: Callable[[int], float]) -> dict[str, float]:
        return spread(value(step) for step in steps)

    table = {
        name: over(lambda s, key=key: rows[s][key]) for name, key in PHASES.items() if _all_have(rows, steps, key)
    }
    before = [step - 1 for step in steps]
    for name, key in PUBLISH.items():
        if _all_have(rows, before, key):
            table[name] = over(lambda s, key=key: rows[s - 1][key])
    table["gaps"] = over(lambda s: _gap(rows, s))
    table["whole step"] = over(lambda s: rows[s]["perf/step_time"])
    return table


def _all_have(rows: Rows, steps: list[int], key: str) -> bool:
    return all(key in rows.get(step, {}) for step in steps)


def _gap(rows: Rows, step: int) -> float:
    row = rows[step]
    claimed = row["perf/generate_time"] + row["perf/train_time"] + rows[step - 1]["perf/update_weights_time"]
    return row["perf/step_time"] - claimed


def generation(rows: Rows, steps: Iterable[int]) -> dict[str, Any]:
    """The bare engine against Miles, pass by pass, over `steps` that made both. Rates are tokens a second."""
    pairs = [rows[s] for s in steps if "bench/raw_s" in rows.get(s, {})]
    if not pairs:
        return {}
    return {
        "raw_s": spread(r["bench/raw_s"] for r in pairs),
        "miles_s": spread(r["bench/miles_s"] for r in pairs),
        "raw_tokens_per_s": spread(r["bench/raw_tokens"] / r["bench/raw_s"] for r in pairs),
        "miles_tokens_per_s": spread(r["rollout/response_tokens"] / r["bench/miles_s"] for r in pairs),
        "share_of_raw": spread(_rate_share(r, r["bench/miles_s"]) for r in pairs),
        "share_of_raw_with_the_drivers_part": spread(
            _rate_share(r, r["perf/generate_time"] - r["bench/raw_s"]) for r in pairs
        ),
    }


def _rate_share(row: Mapping[str, Any], seconds: float) -> float:
    """Tokens a second of Miles, when they took `seconds`, over those of the bare engine."""
    return (row["rollout/response_tokens"] / seconds) / (row["bench/raw_tokens"] / row["bench/raw_s"])


def bar(raw_s: float, flops: float) -> dict[str, float]:
    """Seconds that a whole step may take, and of what they are made."""
    generate_s, train_s = raw_s / SHARE_OF_RAW, flops / (TRAIN_SHARE * PEAK)
    return {
        "generate_s": round(generate_s, 3),
        "train_s": round(train_s, 3),
        "allowance_s": ALLOWANCE_S,
        "whole_s": round(generate_s + train_s + ALLOWANCE_S, 3),
    }


def start_table(run_dir: Path, launched: float, rows: Rows) -> dict[str, float]:
    """Seconds from the command, at `launched`, to the marks of the start, and to the end of the first train step."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]

    def when(event: str, **facts: Any) -> float | None:
        found = [e["time"] for e in events if e["event"] == event and all(e.get(k) == v for k, v in facts.items())]
        return found[0] if found else None

    marks = {
        "settings read": when("run"),
        "Ray, router, engines and trainer started": when("started"),
        "first weights published and proved": rows.get(-1, {}).get("time"),
        "first rollout begins": when("phase", phase="generate"),
        "first train step begins": when("phase", phase="train"),
        "first train step done": rows.get(0, {}).get("time"),
    }
    return {name: round(at - launched, 2) for name, at in marks.items() if at is not None}


def text_of(report: Mapping[str, Any]) -> str:
    """The tables of a report."""
    lines = [f"{'from the command to':<46} {'seconds':>8}"]
    lines += [f"{name:<46} {seconds:>8.1f}" for name, seconds in report["start_s"].items()]
    first = report["first_step_s"]
    lines += ["", "first step: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in first.items())]
    if report["phases_s"]:
        lines += ["", f"{'phase of a step':<32} {'median':>8} {'least':>8} {'most':>8}   repeats"]
        lines += [f"{name:<32} {_numbers(row)}" for name, row in report["phases_s"].items()]
    if report["generation"]:
        lines += ["", f"{'generation':<36} {'median':>10} {'least':>10} {'most':>10}   repeats"]
        lines += [f"{name:<36} {_numbers(row, 10)}" for name, row in report["generation"].items()]
    if limit := report.get("bar"):
        whole, made = limit["whole_s"], report["phases_s"]["whole step"]["median"]
        lines += [
            "",
            f"bar: {limit['generate_s']:.2f} s generating + {limit['train_s']:.2f} s training + {ALLOWANCE_S} s = {whole:.2f} s; "
            f"the step takes {made:.2f} s, {made / whole:.2f} of it",
        ]
    for name, row in report.get("others", {}).items():
        lines += [f"{name}: {row['step_s']:.2f} s a step, {row['times_ours']:.2f} times ours"]
    return "\n".join(lines)


def _numbers(row: Mapping[str, float], width: int = 8) -> str:
    digits = 1 if row["median"] >= 1000 else 3
    return " ".join(f"{row[k]:>{width}.{digits}f}" for k in ("median", "least", "most")) + f"   {row['repeats']}"
