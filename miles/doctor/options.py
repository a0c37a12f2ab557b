"""Command line of `miles doctor loss`: its own flags, and those of the run that it examines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles.config.command_line import split
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.preflight import model_is_complete, reference_is_complete
from miles.config.schema import RunConfig
from miles.core.plugins import add_arguments_of
from miles.errors import ConfigError, Issue

PROG = "miles doctor loss"
MAX_PARAMETERS = 10_000_000
TIMEOUT_S = 900.0
USAGE = f"usage: {PROG} [RECIPE.yaml ...] [--flag value ...]"
HELP = f"""{USAGE}

Trains on one made-up batch again and again, each time split in another way: micro-batches of another size, other packs,
several ranks, samples in another order, trajectories in several samples. Loss and gradient must stay the same. Model,
estimator, loss, corrections, denominator, temperature and data type are the run's; prompts, engines and Ray are not
needed.

Takes every flag of `miles train`, and

  --doctor-seed S        seed of the batch; default 0
  --max-parameters N     largest model of --hf-checkpoint that is used itself; for a larger one, or none, a tiny model of
                         the same family is made; default {MAX_PARAMETERS:,}
  --timeout S            seconds after which to give up; default {TIMEOUT_S:.0f}
  --json FILE            write the result there as JSON

Exit status: 0 nothing depends on the split, 1 something does or the run fails, 2 the command line or recipe is wrong.
"""
OWN = ("--doctor-seed", "--max-parameters", "--timeout", "--json")
EVALUATION = ("eval.prompt_data", "eval.interval")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What is to be examined."""

    config: RunConfig
    seed: int
    max_parameters: int
    timeout_s: float
    json_path: Path | None


def read_options(argv: Sequence[str]) -> Examination:
    """Read the command line, and look at the model folders; raises ConfigError with everything that is wrong."""
    recipes, given = split(argv)
    own: dict[str, tuple[str, ...]] = {}
    rest = list(recipes)
    for item in given:
        if item.flag in OWN:
            own[item.flag] = item.values
        elif len(item.values) == 1 and item.values[0].startswith("-"):
            rest.append(f"{item.flag}={item.values[0]}")
        else:
            rest += [item.flag, *item.values]
    seed = _one(own, "--doctor-seed", int, 0)
    max_parameters = _one(own, "--max-parameters", int, MAX_PARAMETERS)
    timeout_s = _one(own, "--timeout", float, TIMEOUT_S)
    json_path = _one(own, "--json", Path, None)
    if seed < 0:
        raise ConfigError([Issue("--doctor-seed", f"{seed} is negative", "a number from 0")])
    if not timeout_s > 0:
        raise ConfigError([Issue("--timeout", f"{timeout_s:g} s leave no time", "seconds above 0")])
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError([Issue("--json", f"{json_path.parent}: no such folder", "make the folder first")])
    reading = read(rest, add_arguments_of)
    looks = [reference_is_complete, *([model_is_complete] if reading.config.model.hf_checkpoint else [])]
    # Nothing is evaluated: a recipe may be examined before there is data to evaluate on.
    read_issues = [issue for issue in reading.issues if issue.path not in EVALUATION]
    issues = [*read_issues, *run_checks(looks, reading.config, reading.unknown)]
    if issues:
        raise ConfigError(issues)
    return Examination(
        config=reading.config,
        seed=seed,
        max_parameters=max_parameters,
        timeout_s=timeout_s,
        json_path=json_path,
    )


def _one(own: dict[str, tuple[str, ...]], flag: str, kind: Callable[[str], T], default: T) -> T:
    if flag not in own:
        return default
    try:
        (text,) = own[flag]
        return kind(text)
    except ValueError:
        problem = f"got {' '.join(own[flag]) or 'nothing'}"
        raise ConfigError([Issue(flag, problem, f"give one value; see {PROG} --help")]) from None
