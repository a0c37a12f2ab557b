"""The quickstart: make a task, warm a tiny model up with SFT, then let GRPO raise its reward.

Usage: python examples/quickstart/run.py [--seed N] [--out DIR] [FLAGS OF train.py for the GRPO run]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


def main(argv: list[str]) -> int:
    """Run all phases; returns the exit status of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling")
    parser.add_argument("--out", type=Path, help="folder for everything; default runs/quickstart-TIME")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options, grpo_flags = parser.parse_known_args(argv)
    out = (options.out or Path("runs") / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    task, seed = out / "task", str(options.seed)
    started_at = time.monotonic()

    def phase(title: str, *command: str) -> None:
        seconds = time.monotonic() - started_at
        print(f"\n== {title}  ({seconds:.0f} s)", flush=True)
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT)
        try:
            status = process.wait()
        except BaseException:  # interrupted or terminated: the phase ends itself and its children
            process.terminate()
            process.wait()
            raise
        if status:
            sys.exit(status)

    phase("1/3 make the task, the tokenizer and a model of a million parameters",
          "examples/quickstart/make_task.py", "--out", str(task), "--seed", seed)  # fmt: skip
    phase("2/3 warm up: supervised fine-tuning on worked examples",
          "train.py", str(RECIPES / "quickstart-sft.yaml"), "--run-dir", str(out / "sft"),
          "--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "sft.jsonl"),
          "--seed", seed, "--rollout-seed", seed)  # fmt: skip
    warm_model = latest_hf(out / "sft" / "checkpoints")
    held_out = [
        json.dumps({"name": name, "path": str(task / "heldout.jsonl"), "temperature": temperature})
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0))
    ]
    phase("3/3 reinforcement learning: GRPO on prompts it has not seen",
          "train.py", str(RECIPES / "quickstart-grpo.yaml"), "--run-dir", str(out / "grpo"),
          "--hf-checkpoint", str(warm_model), "--prompt-data", str(task / "train.jsonl"),
          "--eval.datasets", *held_out, "--seed", seed, "--rollout-seed", seed, *grpo_flags)  # fmt: skip
    print(summary(out, time.monotonic() - started_at))
    return 0


def latest_hf(checkpoints: Path) -> Path:
    """The exported model of the last checkpoint."""
    iteration = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    return checkpoints / f"iter_{iteration:07d}" / "hf"


def summary(out: Path, seconds: float) -> str:
    """What happened, where it is, and what to try next."""
    rows = [json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines()]
    evals = [row for row in rows if "eval/sampled" in row]
    first, last = evals[0], evals[-1]
    return f"""
Held-out prompts answered correctly, before and after GRPO ({seconds:.0f} s in all):
    sampled  {first["eval/sampled"]:.2f} -> {last["eval/sampled"]:.2f}
    greedy   {first["eval/greedy"]:.2f} -> {last["eval/greedy"]:.2f}

Look at
    {out}/grpo/curve.png                 the reward curve
    {out}/grpo/rollouts/                 every sample as text, a file a step
    {out}/grpo/metrics.jsonl             every number; tensorboard --logdir {out}/grpo/tensorboard
    {latest_hf(out / "grpo" / "checkpoints")}   the trained model, Hugging Face format

Try next
    make quickstart SEED=1
    python examples/quickstart/run.py --lr 2e-3          what too high a learning rate does
    python train.py {out}/grpo/resolved.yaml --run-dir null --dry-run   every setting of this run, and the batch arithmetic
    python train.py --help
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
