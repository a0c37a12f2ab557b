"""How fast a real model learns on one GPU: held-out accuracy of SmolLM2-135M-Instruct against minutes and steps.

Usage: python -m benchmarks.learning --data runs/smollm2 [--plot FILE.svg] [--json OUT] [--tiny] [FLAGS OF train.py]

Runs recipes/smollm2-sums-gpu.yaml on what examples/smollm2/prepare.py and sums.py wrote into `--data`. Printed: held-out
accuracy at every evaluation, greedy by the whole answer, greedy by a lenient grader, and sampled, beside the reward of the
training batches since the evaluation before. Minutes count from the start of the run, that of all processes included. Run it
from the repository's root. `--tiny` is the quickstart's untrained model on a CPU: it shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import gpu_loop, learning_curve

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "smollm2-sums-gpu.yaml"
TINY = ROOT / "recipes" / "quickstart-grpo.yaml"
TINY_FLAGS = {"--device": "cpu", "--engine-backend": "torch", "--torch-threads": "1", "--rollout-batch-size": "4"}
TINY_FLAGS |= {"--num-rollout": "4", "--eval-interval": "2", "--save-interval": "100", "--lr": "1e-4"}


def main(argv: list[str]) -> int:
    """Run, then print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder with model/, sums-train.jsonl and sums-heldout.jsonl")
    parser.add_argument("--run", type=Path, help="only report on this finished run")
    parser.add_argument("--run-dir", type=Path, help="keep the run here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the curve here, .svg or .png")
    parser.add_argument("--limit", type=float, default=590, metavar="S", help="end the run after so many seconds")
    parser.add_argument("--tiny", action="store_true", help="an untrained small model on a CPU")
    options, flags = parser.parse_known_args(argv)
    if not (options.run or options.tiny or options.data):
        parser.error("--data DIR is missing: the folder that examples/smollm2/prepare.py and sums.py wrote")
    status = 0
    with tempfile.TemporaryDirectory(prefix="miles-learning-") as temporary:
        run_dir: Path = (options.run or options.run_dir or Path(temporary) / "run").resolve()
        train_command: list[str] = []
        if options.run is None:
            data = tiny_data(Path(temporary)) if options.tiny else options.data.resolve()
            train_command = command_of(data, run_dir, options.tiny, flags)
            _, status = gpu_loop.run(train_command, options.limit)
            if status and not (run_dir / "metrics.jsonl").is_file():
                return status
        report = report_of(run_dir)
        if options.plot:
            learning_curve.draw(options.plot, [run_dir])
    report |= {
        "command": shlex.join(["python", "-m", "benchmarks.learning", *argv]),
        "train_command": shlex.join(["python", *train_command[1:]]),
        "hardware": gpu_loop.hardware(),
        "versions": gpu_loop.versions(),
        "exit_status": status,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{report['hardware']}, {report['versions']}\n\n{text_of(report)}")
    return status


def command_of(data: Path, run_dir: Path, tiny: bool, flags: list[str]) -> list[str]:
    """The command of the run."""
    command = [sys.executable, "train.py", str(TINY if tiny else RECIPE), "--run-dir", str(run_dir)]
    command += ["--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "sums-train.jsonl")]
    held_out = {"path": str(data / "sums-heldout.jsonl")}
    datasets = [
        {"name": "exact", "temperature": 0.0},
        {"name": "sampled", "temperature": 1.0, "n_samples_per_eval_prompt": 4},
        {"name": "lenient", "temperature": 0.0, "rm_type": "math"},
    ]
    command += ["--eval.datasets", *(json.dumps(dataset | held_out) for dataset in datasets)]
    if tiny:
        command += [word for pair in TINY_FLAGS.items() for word in pair]
    return [*command, *flags]


def tiny_data(folder: Path) -> Path:
    """The quickstart's task and untrained model under the names of this one; returns its folder."""
    from examples.quickstart import make_task

    make_task.main(["--out", str(folder), "--seed", "0"])
    for name, count in (("train", 64), ("heldout", 16)):
        rows = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"sums-{name}.jsonl").write_text("".join(rows[:count]), encoding="utf-8")
    return folder


def report_of(run_dir: Path) -> dict[str, Any]:
    """The evaluations of a run, and how far accuracy rose."""
    points = learning_curve.evaluations(run_dir)
    report: dict[str, Any] = {"what": "held-out accuracy of one run", "evaluations": points}
    if points:
        first, last = points[0], points[-1]
        best = max(points, key=lambda point: point["exact"])
        report |= {
            "rise_in_points": {name: _points(last[name] - first[name]) for name in learning_curve.SERIES},
            "best_rise_in_points": _points(best["exact"] - first["exact"]),
            "minutes": last["minutes"],
            "standard_error_in_points": _points(_standard_error(last["exact"], last["num_prompts"])),
        }
    return report


def _points(share: float) -> float:
    return round(100 * share, 1)


def _standard_error(share: float, count: float) -> float:
    return math.sqrt(share * (1 - share) / count)


def text_of(report: dict[str, Any]) -> str:
    """The table of a report."""
    lines = [f"{'step':>4} {'minutes':>8} {'exact':>7} {'lenient':>8} {'sampled':>8} {'train reward':>13}"]
    for point in report["evaluations"]:
        reward = "" if point["train_reward"] is None else f"{point['train_reward']:.3f}"
        lines.append(
            f"{point['steps']:>4} {point['minutes']:>8.2f} {point['exact']:>7.3f} {point['lenient']:>8.3f} "
            f"{point['sampled']:>8.3f} {reward:>13}"
        )
    if "minutes" in report:
        rises = ", ".join(f"{name} {points:+.1f}" for name, points in report["rise_in_points"].items())
        error = report["standard_error_in_points"]
        lines.append(
            f"points gained after {report['minutes']:.1f} minutes: {rises} (standard error of exact {error:.1f})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
