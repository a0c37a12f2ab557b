"""Command line of `miles verify-resume`: its own flags, and those of the run, which it changes to save and to count."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles.config.cli import parse
from miles.config.command_line import split
from miles.config.resources import evaluates, needs_engines
from miles.config.schema import RunConfig
from miles.core.plugins import add_arguments_of
from miles.errors import ConfigError, Issue
from miles.utils import checkpoint_folder
from miles.utils.step_path import STEP
from miles.verify_resume.points import PHASES, KillPoint

PROG = "miles verify-resume"
STEPS = 4
HELP = f"""usage: {PROG} [RECIPE.yaml ...] [--flag value ...]

Runs the recipe without interruption; runs it again, kills the driver with SIGKILL at a random moment, and resumes it from
its checkpoints until the end; then compares the two. With --deterministic-mode they must agree bit for bit. Without, the
trainer's state must come back exactly, and every prompt group must be accounted for as in the uninterrupted run.

Takes every flag of `miles train`, and

  --steps N              rollout steps of each run; default {STEPS}, or --num-rollout when that is less
  --kills K              times the run is killed; default 1
  --kill-seed S          seed of the random moments; default 0
  --at STEP.PHASE[:F]    kill there instead: PHASE is one of {", ".join(PHASES)}, F the part of its time that has
                         passed, as in `--at 2.save:0.5`; several moments may follow each other
  --out DIR              keep everything there; unset keeps it under runs/ when something differs
  --json FILE            write the result there as JSON

Exit status: 0 equal, 1 different or a run failed, 2 the command line or recipe is wrong.
"""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What is to be run and compared."""

    config: RunConfig
    argv: tuple[str, ...]
    """Command line of the runs, without what differs between them."""
    out: Path
    keep: bool
    json_path: Path | None
    steps: range
    points: tuple[KillPoint, ...]
    """Rising."""

    @property
    def order_matters(self) -> bool:
        """Whether which groups are trained on depends on what was sampled, or on how long it took."""
        rollout = self.config.rollout
        return bool(
            rollout.dynamic_sampling_filter_path
            or rollout.over_sampling_batch_size
            or rollout.sample_filter_path
            or self.config.data.buffer_filter_path
        )


def read_options(argv: Sequence[str]) -> Verification:
    """Read the command line; ends the process (SystemExit) like `train.py` when the run's part of it is wrong.

    Raises ConfigError when the verb's own flags are.
    """
    recipes, given = split(argv)
    own: dict[str, tuple[str, ...]] = {}
    rest = list(recipes)
    for item in given:
        if item.flag in ("--steps", "--kills", "--kill-seed", "--at", "--out", "--json"):
            own[item.flag] = (*own.get(item.flag, ()), *item.values)
        elif len(item.values) == 1 and item.values[0].startswith("-"):
            rest.append(f"{item.flag}={item.values[0]}")
        else:
            rest += [item.flag, *item.values]
    wanted = _one(own, "--steps", int, None)
    if wanted is not None and wanted < 2:
        raise _wrong("--steps", f"{wanted} leaves nothing to resume", "--steps 2 or more")
    out = _one(own, "--out", Path, None) or Path("runs") / f"verify-resume-{time.strftime('%Y%m%d-%H%M%S')}"
    if out.exists() and any(out.iterdir()):
        raise _wrong("--out", f"{out} is not empty", "give a new folder")
    out = out.absolute()
    rest += ["--save-interval", "1", "--save", "null", "--save-trigger-sentinel", "null", "--keep-last", "null"]
    length = [] if wanted is None else ["--num-rollout", str(wanted)]
    samples = ["--save-debug-rollout-data", str(out / f"{STEP}.jsonl")]
    config = parse([*rest, *length, *samples, "--run-dir", str(out / "check")], add_arguments_of, prog=PROG)

    first = _first_step(config)
    count = wanted if wanted is not None else min(STEPS, (config.rollout.num_rollout or first + STEPS) - first)
    if count < 2:
        raise _wrong("rollout.num_rollout", f"{count} steps leave nothing to resume", "--steps 2 or more")
    steps = range(first, first + count)
    points = [_point(text, config, steps) for text in own.get("--at", ())]
    if not points:
        kills = _one(own, "--kills", int, 1)
        points = draw(config, steps, kills, _one(own, "--kill-seed", int, 0))
    return Verification(
        config=config,
        argv=(*rest, "--num-rollout", str(steps.stop)),
        out=out,
        keep="--out" in own,
        json_path=_one(own, "--json", Path, None),
        steps=steps,
        points=tuple(sorted(points)),
    )


def draw(config: RunConfig, steps: range, kills: int, seed: int) -> list[KillPoint]:
    """Moments at random, before the checkpoint after the last step is complete."""
    rng = random.Random(seed)
    last = steps.stop - 1
    choices = [(s, p) for s in steps for p in phases_of(config, s, steps) if s < last or p in ("generate", "train")]
    return [KillPoint.at(*rng.choice(choices), fraction=round(rng.random(), 2)) for _ in range(max(1, kills))]


def phases_of(config: RunConfig, step: int, steps: range) -> list[str]:
    """The phases that `step` has in this run."""
    interval = config.eval.interval
    due = interval is not None and ((step + 1) % interval == 0 or step == steps.stop - 1)
    return [
        phase
        for phase in PHASES
        if (phase != "publish" or needs_engines(config)) and (phase != "evaluate" or (due and evaluates(config)))
    ]


def _point(text: str, config: RunConfig, steps: range) -> KillPoint:
    place, _, part = text.partition(":")
    step, _, phase = place.partition(".")
    try:
        point = KillPoint.at(int(step), phase, fraction=float(part or 0.5))
    except ValueError:
        raise _wrong("--at", f"{text!r} is no moment", "STEP.PHASE or STEP.PHASE:0.5, as in 2.save") from None
    found = phases_of(config, point.step, steps)
    if point.step not in steps or phase not in found or not 0 <= point.fraction <= 1:
        when = f"steps {steps.start} to {steps.stop - 1} with the phases {', '.join(found)}, and parts from 0 to 1"
        raise _wrong("--at", f"{text} is not in this run", f"it has {when}")
    return point


def _first_step(config: RunConfig) -> int:
    load = config.checkpoint.load
    folder = checkpoint_folder.resolve(load) if load is not None else None
    return int(checkpoint_folder.read_state(folder)["next_step"]) if folder is not None else 0


def _one(own: dict[str, tuple[str, ...]], flag: str, kind: Callable[[str], T], default: T) -> T:
    if flag not in own:
        return default
    try:
        (text,) = own[flag]
        return kind(text)
    except ValueError:
        raise _wrong(flag, f"got {' '.join(own[flag]) or 'nothing'}", f"give one value; see {PROG} --help") from None


def _wrong(path: str, problem: str, fix: str) -> ConfigError:
    return ConfigError([Issue(path, problem, fix)])
