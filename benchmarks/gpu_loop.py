"""The whole loop on one GPU: phases of a step, generation through Miles against the bare engine, updates, the start.

Usage: python -m benchmarks.gpu_loop [--model 0.6b] [--pairs 5] [--steps 4] [--json OUT] [--tiny] [FLAGS OF train.py]

One colocated GRPO run of a Qwen3 shape with random weights: 64 prompts x 8 samples, 128 tokens in and 512 out, one
optimizer step a rollout. Step 0 pays what is compiled; in the next `--pairs` steps the bare engine gets the requests of a
rollout too, before or after Miles in turns; `--steps` plain steps follow, and the phases are theirs. `--against NAME=SECONDS`
compares with a step of something else that was measured on the same machine. Run it from the repository's root.
`--tiny` is a small model on the torch engine and a CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import loop_report

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "sglang", "transformers", "ray", "triton")
SGLANG = [
    *("--sglang-mem-fraction-static", "0.5"),
    *("--sglang-attention-backend", "flashinfer"),
    *("--sglang-sampling-backend", "pytorch"),
    *("--sglang-grammar-backend", "none"),
]
FIRST_PAIR = 1


def parser() -> argparse.ArgumentParser:
    """The flags; whatever it does not know goes to train.py."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--model", choices=["0.6b", "1.7b", "4b", "tiny"], default="0.6b")
    made.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    made.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    made.add_argument("--input-len", type=int, default=128)
    made.add_argument("--output-len", type=int, default=512)
    made.add_argument("--max-tokens", type=int, default=32768, help="tokens of a micro-batch")
    made.add_argument("--pairs", type=int, default=5, help="steps in which the bare engine is measured too")
    made.add_argument("--steps", type=int, default=4, help="plain steps after them")
    made.add_argument("--against", action="append", default=[], metavar="NAME=SECONDS", help="another step to compare")
    made.add_argument(
        "--out", type=Path, help="keep the model and every run here; a model that is there is used again"
    )
    made.add_argument("--json", type=Path, help="write the figures here")
    made.add_argument("--limit", type=float, default=540, metavar="S", help="end the run after so many seconds")
    made.add_argument("--tiny", action="store_true", help="a small model, the torch engine, a CPU")
    return made


def main(argv: list[str]) -> int:
    """Run, then print the tables; returns the exit status."""
    options, flags = parser().parse_known_args(argv)
    others = dict(_named_seconds(text) for text in options.against)
    if options.tiny:
        options.model, options.prompts, options.samples = "tiny", 4, 2
        options.input_len, options.output_len = 16, 16
    with tempfile.TemporaryDirectory(prefix="miles-loop-") as temporary:
        folder: Path = (options.out or Path(temporary)).resolve()
        run_dir = new_run_dir(folder)
        command = prepare(options, folder, run_dir, flags)
        launched, status = run(command, options.limit)
        if status and not (run_dir / "metrics.jsonl").is_file():
            return status
        report = report_of(run_dir, launched, options, others)
    report |= {"command": shlex.join(["python", "-m", "benchmarks.gpu_loop", *argv]), "exit_status": status}
    report["train_command"] = shlex.join(["python", *command[1:]])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{report['what']}\n{report['hardware']}, {report['versions']}\n\n{loop_report.text_of(report)}")
    return status


def _named_seconds(text: str) -> tuple[str, float]:
    name, _, seconds = text.rpartition("=")
    try:
        return name, float(seconds)
    except ValueError:
        sys.exit(f"--against {text}: expected NAME=SECONDS, such as TRL=24.05")


def new_run_dir(folder: Path) -> Path:
    """A name below `folder` that no run has yet."""
    return next(path for number in itertools.count() if not (path := folder / f"run-{number}").exists())


def prepare(options: Any, folder: Path, run_dir: Path, flags: list[str]) -> list[str]:
    """Model and prompts in `folder`, unless they are there; returns the command of the run."""
    from benchmarks import loop_workload

    folder.mkdir(parents=True, exist_ok=True)
    model, prompts, steps = folder / options.model, folder / "prompts.jsonl", 1 + options.pairs + options.steps
    if not (model / "config.json").is_file():
        loop_workload.write_folder(options.model, model, "cpu" if options.tiny else "cuda")
    loop_workload.write_prompts(prompts, options.prompts * steps, options.input_len)
    tokens = max(options.max_tokens, options.input_len + options.output_len)
    command = [sys.executable, "train.py", "--hf-checkpoint", str(model), "--prompt-data", str(prompts)]
    command += ["--label-key", "label", "--rm-type", "deterministic_random", "--run-dir", str(run_dir)]
    command += ["--rollout-function-path", "benchmarks.loop_hooks.RawBesideMiles"]
    command += ["--custom-generate-function-path", "benchmarks.loop_hooks.generate"]
    command += ["--bench-pairs", str(options.pairs), "--num-rollout", str(steps), "--num-steps-per-rollout", "1"]
    command += ["--rollout-batch-size", str(options.prompts), "--n-samples-per-prompt", str(options.samples)]
    command += ["--rollout-max-response-len", str(options.output_len), "--max-tokens-per-gpu", str(tokens)]
    command += ["--skip-actor-forward-only"]  # the weights of the one optimizer step are those that sampled
    command += ["--lr", "1e-6", "--run.use-tensorboard", "false"]
    command += ["--engine.max-running-requests", str(options.prompts * options.samples)]
    if options.tiny:
        command += ["--device", "cpu", "--engine-backend", "torch", "--torch-threads", "1"]
    else:
        command += ["--colocate", "--bf16", *SGLANG]
    return [*command, *flags]


def run(command: list[str], limit_s: float) -> tuple[float, int]:
    """Run `command` for at most `limit_s` seconds; returns when it was started, in seconds since 1970, and its status."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    launched = time.time()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        return launched, process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"ended after {limit_s:.0f} s; the figures are of the steps that were done", flush=True)
        process.send_signal(signal.SIGTERM)
        return launched, process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def report_of(run_dir: Path, launched: float, options: Any, others: dict[str, float]) -> dict[str, Any]:
    """All figures of a run; of one that ended early, those that it has."""
    rows = loop_report.read_rows(run_dir / "metrics.jsonl")
    plain = loop_report.whole_steps(rows, FIRST_PAIR + options.pairs)
    sizes = f"{options.prompts} prompts x {options.samples} samples, {options.input_len} tokens in, {options.output_len} out"
    first = rows.get(0, {})
    report: dict[str, Any] = {
        "what": f"GRPO, Qwen3 {options.model} with random weights, {sizes}, one optimizer step a rollout",
        "hardware": hardware(),
        "versions": versions(),
        "start_s": loop_report.start_table(run_dir, launched, rows),
        "first_step_s": {name.strip(): first[key] for name, key in loop_report.PHASES.items() if key in first},
        "phases_s": loop_report.phase_table(rows, plain) if plain else {},
        "generation": loop_report.generation(rows, range(FIRST_PAIR, FIRST_PAIR + options.pairs)),
    }
    if plain and report["generation"]:
        from benchmarks.train_step import operations

        lengths = [options.input_len + options.output_len] * (options.prompts * options.samples)
        flops = operations(options.model, lengths)
        report["bar"] = loop_report.bar(report["generation"]["raw_s"]["median"], flops)
    if plain:
        ours = report["phases_s"]["whole step"]["median"]
        report["others"] = {n: {"step_s": s, "times_ours": round(s / ours, 3)} for n, s in others.items()}
    return report


def hardware() -> str:
    """The GPUs, or the processor where there is none."""
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return f"{os.cpu_count()} cores of {platform.machine()}, no GPU"


def versions() -> dict[str, str]:
    """Versions of what takes part, of what is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
