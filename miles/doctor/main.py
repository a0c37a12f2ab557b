"""The verb: let the ranks train, compare, tell."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles.config.batch_math import batch_plan
from miles.config.dump import dump
from miles.config.objectives import objective_of
from miles.config.schema import RunConfig
from miles.doctor.options import HELP, PROG, USAGE, Examination, read_options
from miles.errors import MilesError
from miles.utils.process import die_with_parent, last_lines
from miles.utils.verb import run_verb

TOLERANCE_FP32, TOLERANCE_BF16 = 1e-6, 2e-3
"""Of the loss, and of the gradient's size: what is left along the whole batch's gradient."""
DIRECTION_FP32, DIRECTION_BF16 = 1e-5, 5e-2
"""Of the gradient's direction, where all rounding of a forward and backward pass is: 1e-6 and 2e-2 of small models."""
SECTIONS = {"loss": "loss and gradient do not depend on how the work is split"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to split the work against the whole."""

    name: str
    ranks: int
    max_tokens: int
    """Tokens that a micro-batch may hold."""
    loss: float | None
    """Difference relative to the larger of loss and gradient norm; a policy loss is about 0 on policy. None where not compared."""
    gradient: float | None
    """Difference along the whole batch's gradient, relative to its norm."""
    direction: float | None
    """Difference across it, relative to its norm."""
    tolerance: float
    """Of loss and gradient."""
    direction_tolerance: float
    verdict: str
    """`OK`, `DIFFERS`, or `by definition` where the setting says that the split counts."""
    why: str | None = None

    @property
    def fails(self) -> bool:
        return self.verdict == "DIFFERS"


def main(argv: Sequence[str]) -> int:
    """Run `miles doctor ...`; returns the exit status."""
    usage = f"{USAGE}\n  loss: {SECTIONS['loss']}"
    return run_verb(argv, read_options, examine, help_text=HELP, word="loss", usage=usage)


def examine(examination: Examination) -> int:
    """Train, compare and report; 0 when nothing depends on the split."""
    config = examination.config
    found = train_in_every_way(examination)
    rows = compare(config, found["rows"])
    ok = not any(row.fails for row in rows)
    facts = facts_of(config, found["rows"][0])
    report = {"ok": ok, "model": found["model"], **facts, "rows": [asdict(row) for row in rows]}
    if examination.json_path is not None:
        examination.json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failing = [row.name for row in rows if row.fails]
    verdict = "nothing depends on how the work is split" if ok else f"depends on the split: {'; '.join(failing)}"
    sys.stdout.write(f"{heading(found['model'], facts)}\n{table(rows)}\n{summary(facts)}\n{verdict}\n")
    return 0 if ok else 1


def train_in_every_way(examination: Examination) -> dict[str, Any]:
    """What the ranks found: `model`, and a row for the whole batch and each variation. Raises MilesError when they fail."""
    with tempfile.TemporaryDirectory(prefix="miles-doctor-") as name:
        work = Path(name)
        (work / "config.yaml").write_text(dump(examination.config), encoding="utf-8")
        task = {"seed": examination.seed, "max_parameters": examination.max_parameters}
        (work / "task.json").write_text(json.dumps(task))
        log_path = work / "log.txt"
        with open(log_path, "wb") as log:
            host = subprocess.Popen(
                [sys.executable, "-m", "miles.doctor.ranks", name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            host.wait(examination.timeout_s)
        except subprocess.TimeoutExpired:
            lines = last_lines(log_path)
            raise MilesError(
                f"the ranks were not done after {examination.timeout_s:g} s: {lines}\n    fix: a larger --timeout, or a "
                "smaller --max-parameters"
            ) from None
        finally:
            _end(host)
        try:
            found = json.loads((work / "result.json").read_text())
        except FileNotFoundError:
            raise MilesError(f"the ranks failed:\n{last_lines(log_path)}") from None
        if "error" in found:
            lines = "" if "\n    fix: " in found["error"] else f"\n{last_lines(log_path)}"
            raise MilesError(f"{found['error']}{lines}")
        return found


def _python_path() -> str:
    """Where this process finds modules, so that hooks beside the recipe are found there too."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _end(host: subprocess.Popen[bytes]) -> None:
    """End the host and its ranks, which are one process group."""
    if host.poll() is None:
        os.killpg(host.pid, signal.SIGKILL)
    host.wait()


def compare(config: RunConfig, found: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each variation against the first of `found`; raises MilesError when there is no gradient to compare."""
    bf16 = config.train.bf16
    bounds = (TOLERANCE_BF16, DIRECTION_BF16) if bf16 else (TOLERANCE_FP32, DIRECTION_FP32)
    base, *others = found
    norm = base["gradient_norm"]
    if not (math.isfinite(norm) and norm > 0 and base["metrics"]["train/skipped_steps"] == 0):
        raise MilesError(
            f"the gradient's norm is {norm}: there is nothing to compare\n    fix: look at the coefficients of the loss; "
            "another --doctor-seed makes another batch"
        )
    return [_row(base, other, norm, bounds) for other in others]


def _row(base: dict[str, Any], other: dict[str, Any], norm: float, bounds: tuple[float, float]) -> Row:
    tolerance, direction_tolerance = bounds
    place = {name: other[name] for name in ("name", "ranks", "max_tokens")}
    place |= {"tolerance": tolerance, "direction_tolerance": direction_tolerance}
    if base["facts"]["denominator"] == "sequences" and other["splits"]:
        why = "--loss-denominator sequences weighs each sample alike, so a trajectory in two counts twice"
        return Row(**place, loss=None, gradient=None, direction=None, verdict="by definition", why=why)
    losses = [row["metrics"]["train/loss"] for row in (base, other)]
    loss = abs(losses[1] - losses[0]) / max(abs(losses[0]), norm)
    gradient, direction = other["gradient"], other["direction"]
    tokens = [int(row["metrics"]["train/trainable_tokens"]) for row in (base, other)]
    why = None
    if tokens[0] != tokens[1]:
        why = f"{tokens[1]} trainable tokens instead of {tokens[0]}"
    elif not loss <= tolerance:
        why = f"loss {losses[1]!r} instead of {losses[0]!r}"
    elif not gradient <= tolerance:
        why = f"the gradient's size is another by {gradient:.1e} of it"
    elif not direction <= direction_tolerance:
        why = f"the gradient points elsewhere by {direction:.1e} of its norm"
    verdict = "OK" if why is None else "DIFFERS"
    return Row(**place, loss=loss, gradient=gradient, direction=direction, verdict=verdict, why=why)


def facts_of(config: RunConfig, base: dict[str, Any]) -> dict[str, Any]:
    """What the configuration trains, and how far a token moves the weights."""
    algorithm, optimizer, plan = config.algorithm, config.optimizer, batch_plan(config)
    facts, metrics = base["facts"], base["metrics"]
    supervised = algorithm.loss_type == "sft_loss"
    grad_norm, clip = metrics["train/grad_norm"], optimizer.clip_grad
    scale = min(1.0, clip / grad_norm) if clip else 1.0
    used = metrics["train/trainable_tokens"]
    clipped = metrics.get("train/pg_clipfrac", 0.0)
    return {
        "loss_type": algorithm.loss_type,
        "estimator": None if supervised else algorithm.advantage_estimator,
        "objective": None if supervised else objective_of(algorithm.advantage_estimator, algorithm.policy_objective),
        "denominator": facts["denominator"],
        "correction": "tis" if config.correction.use_tis else config.correction.preset,
        "compute": "bf16" if config.train.bf16 else "fp32",
        "lr": optimizer.lr,
        "clip_scale": scale,
        "token_weight": facts["token_weight"],
        "effective_lr": {name: optimizer.lr * scale * x for name, x in facts["token_weight"].items()},
        "batch": {name: facts[name] for name in ("tokens", "response_tokens", "trainable_tokens", "optimizer_steps")},
        "share_trainable": facts["trainable_tokens"] / facts["tokens"],
        "share_with_gradient": used * (1 - clipped) / facts["tokens"],
        "tokens_per_step": facts["trainable_tokens"] / facts["optimizer_steps"],
        "trajectories_per_step_of_the_run": plan.global_batch_size,
        "most_tokens_per_step_of_the_run": plan.global_batch_size * config.rollout.max_response_len,
    }


def heading(model: str, facts: dict[str, Any]) -> str:
    """What was examined."""
    named = ("estimator", "objective", "denominator", "correction", "compute")
    what = ", ".join(f"{name} {facts[name]}" for name in named if facts[name] not in (None, "none"))
    return f"{PROG}: {facts['loss_type']}, {what}\nmodel: {model}\n"


def table(rows: Sequence[Row]) -> str:
    """A line for each row, and below those that are not OK, why."""
    width = max(len(row.name) for row in rows)
    lines = [f"  {'':<{width}}  ranks  micro-batch  {'loss':>7}  {'gradient':>8}  {'bound':>5}  direction  bound"]
    for row in rows:
        loss, gradient, direction = ("-" if x is None else f"{x:.0e}" for x in (row.loss, row.gradient, row.direction))
        sizes = f"{row.ranks:>5}  {row.max_tokens:>11}"
        numbers = f"{loss:>7}  {gradient:>8}  {row.tolerance:.0e}  {direction:>9}  {row.direction_tolerance:.0e}"
        lines.append(f"  {row.name:<{width}}  {sizes}  {numbers}  {row.verdict}")
        if row.why is not None:
            lines.append(f"      {row.why}")
    return "\n".join(lines)


def summary(facts: dict[str, Any]) -> str:
    """Learning rate of a token, shares and sizes."""
    lr, batch = facts["effective_lr"], facts["batch"]
    return (
        f"effective learning rate of a token: {lr['mean']:.2e} ({lr['min']:.2e} to {lr['max']:.2e}) = lr {facts['lr']:g}"
        f" x clip scale {facts['clip_scale']:.3g} x weight {facts['token_weight']['mean']:.3g}\n"
        f"tokens with gradient: {facts['share_with_gradient']:.0%} of {batch['tokens']}; trainable are "
        f"{batch['trainable_tokens']} ({facts['share_trainable']:.0%})\n"
        f"tokens per step: {facts['tokens_per_step']:.0f} here; in the run at most "
        f"{facts['most_tokens_per_step_of_the_run']:,} of {facts['trajectories_per_step_of_the_run']} trajectories"
    )
