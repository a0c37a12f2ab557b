"""A run's held-out accuracy and training reward as numbers and as a picture, against minutes and steps.

Usage: python -m benchmarks.learning_curve RUN_DIR [RUN_DIR ...] --out FILE.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

SERIES = ("exact", "lenient", "sampled")
"""Names of the evaluation sets: greedy and judged whole, greedy and judged leniently, sampled at temperature 1."""
LABELS = {"exact": "held out, greedy", "sampled": "held out, sampled"}
COLOURS = {"exact": "#0b6e99", "sampled": "#d9730d", "train": "#9b9a97"}
REWARD = "rollout/reward"


def read(run_dir: Path) -> tuple[float, list[dict[str, Any]]]:
    """When the run began, in seconds since 1970, and the rows of its metrics."""
    events = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    began = next(event["time"] for event in map(json.loads, events) if event["event"] == "run")
    rows = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return began, [json.loads(row) for row in rows]


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """One entry an evaluation: steps done, minutes since the start, accuracies, and the mean training reward before it."""
    began, rows = read(run_dir)
    points: list[dict[str, Any]] = []
    rewards: list[float] = []
    for row in rows:
        if REWARD in row:
            rewards.append(row[REWARD])
        if all(f"eval/{name}" in row for name in SERIES):
            points.append(
                {
                    "steps": row["step"] + 1,
                    "minutes": round((row["time"] - began) / 60, 3),
                    **{name: row[f"eval/{name}"] for name in SERIES},
                    "num_prompts": row["eval/exact/num_prompts"],
                    "train_reward": statistics.mean(rewards) if rewards else None,
                }
            )
            rewards = []
    return points


def training(run_dir: Path) -> list[tuple[float, int, float]]:
    """Minutes since the start, steps done, and reward of every training batch."""
    began, rows = read(run_dir)
    return [((row["time"] - began) / 60, row["step"] + 1, row[REWARD]) for row in rows if REWARD in row]


def draw(path: Path, run_dirs: list[Path]) -> None:
    """Accuracy against minutes on the left and against steps on the right, a line a run; SVG or PNG by the suffix."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "miles"  # the same numbers make the same file
    figure = Figure(figsize=(9, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for number, run_dir in enumerate(run_dirs):
        points, batches = evaluations(run_dir), training(run_dir)
        for axes, position in ((left, 0), (right, 1)):
            x = [point["minutes" if position == 0 else "steps"] for point in points]
            axes.plot(
                [batch[position] for batch in batches],
                [100 * batch[2] for batch in batches],
                color=COLOURS["train"],
                linewidth=1,
                label=None if number else "training batches, sampled",
            )
            for name in ("sampled", "exact"):
                axes.plot(
                    x,
                    [100 * point[name] for point in points],
                    color=COLOURS[name],
                    marker="o",
                    markersize=4,
                    linewidth=2 if name == "exact" else 1.4,
                    label=None if number else LABELS[name],
                )
    left.set_xlabel("minutes from the start")
    right.set_xlabel("steps")
    left.set_ylabel("right answers, %")
    left.set_ylim(0, 100)
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: list[str]) -> int:
    """Draw the runs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, help="picture, .svg or .png")
    options = parser.parse_args(argv)
    draw(options.out, options.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
