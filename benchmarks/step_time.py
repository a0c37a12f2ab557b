"""Where the time of a training step goes: generate, reward, train, update, wait.

Usage: python benchmarks/step_time.py [--run RUN_DIR] [--json OUT]

Reads the metrics of a finished run; without --run it runs the quickstart first. Medians over all steps but the first two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 2


def main(argv: list[str]) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished run")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or quickstart(Path(folder))
        split = split_of_steps(run)
    print(f"{'part':<10} {'seconds':>8} {'share':>6}")
    for part, seconds in split.items():
        print(f"{part:<10} {seconds:>8.3f} {seconds / split['step']:>6.1%}")
    if options.json:
        options.json.write_text(json.dumps(split, indent=1) + "\n")
    return 0


def quickstart(folder: Path) -> Path:
    """Run the quickstart in `folder`; returns the folder of its GRPO run."""
    subprocess.run([sys.executable, "examples/quickstart/run.py", "--out", str(folder)], cwd=ROOT, check=True)
    return folder / "grpo"


def split_of_steps(run: Path) -> dict[str, float]:
    """Median seconds of a step and of its parts. What no part claims is `wait`: calls between processes, logging."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["step"] >= WARM_UP_STEPS:
            steps.setdefault(row["step"], {}).update(row)
    # A step is measured from one train log to the next, so its update is the one logged under the step before; steps that
    # follow an evaluation or a save hold that too, and are left out.
    whole = [
        (row, steps[step - 1])
        for step, row in sorted(steps.items())
        if step - 1 in steps and not {"perf/eval_time", "perf/save_time"} & set(steps[step - 1])
    ]

    def median(name: str, *, before: bool = False) -> float:
        return statistics.median(pair[before][name] for pair in whole)

    step = median("perf/step_time")
    reward = median("rollout/reward_tail_s")
    parts = {
        "generate": median("perf/generate_time") - reward,
        "reward": reward,
        "train": median("perf/train_time"),
        "update": median("perf/update_weights_time", before=True),
    }
    return {**parts, "wait": max(0.0, step - sum(parts.values())), "step": step}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
