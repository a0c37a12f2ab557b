"""Command line of `miles reward check`: its own flags, and those of the reward's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from miles.config.command_line import split
from miles.config.load import read
from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.core.plugins import add_arguments_of
from miles.errors import ConfigError, Issue

PROG = "miles reward check"
USAGE = f"usage: {PROG} FILE [RECIPE.yaml ...] [--rm-type TYPE] [--flag value ...]"
HELP = f"""{USAGE}

Grades the responses of FILE again and compares with the rewards that it has. FILE is one that
--save-debug-rollout-data wrote, a run's rollouts/*.jsonl, or any JSON Lines with rows like
{{"response": "...", "label": "...", "reward": 1.0}}. The reward is that of the flags and recipes, as in a run:
--rm-type, --custom-rm-path, --group-rm, --reward-key, --rm-url and reward.*. With --hf-checkpoint, special tokens at the
end of responses are left out as in a run.

  --show N              differences and errors to print in full; default 5
  --tolerance X         how far apart equal rewards may be; default 1e-6
  --in-flight N         samples to grade at the same time; default 64
  --allow-differences   exit with 0 though rewards differ
  --json FILE           write the result there as JSON

Exit status: 0 every reward is as stored, 1 some differ or could not be computed, 2 the command line is wrong.
"""
SWITCH = "--allow-differences"
OWN = ("--show", "--tolerance", "--in-flight", "--json", SWITCH)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be graded, and how."""

    path: str
    config: RunConfig
    show: int
    tolerance: float
    in_flight: int
    allow_differences: bool
    json_path: Path | None


def read_options(argv: Sequence[str]) -> Options:
    """Read the command line after the verb; raises ConfigError with everything that is wrong."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError([Issue(PROG, "names no file", f"{PROG} FILE --rm-type TYPE")])
    path, rest = argv[0], [a for a in argv[1:] if a != SWITCH]
    recipes, given = split(rest)
    own: dict[str, tuple[str, ...]] = {}
    others = list(recipes)
    for item in given:
        if item.flag in OWN:
            own[item.flag] = item.values
        elif len(item.values) == 1 and item.values[0].startswith("-"):
            others.append(f"{item.flag}={item.values[0]}")
        else:
            others += [item.flag, *item.values]
    return Options(
        path=path,
        config=_config(others),
        show=_one(own, "--show", int, 5, lambda n: n >= 0),
        tolerance=_one(own, "--tolerance", float, 1e-6, lambda x: x >= 0),
        in_flight=_one(own, "--in-flight", int, 64, lambda n: n > 0),
        allow_differences=SWITCH in argv,
        json_path=_one(own, "--json", Path, None, lambda p: p.absolute().parent.is_dir()),
    )


def _config(argv: Sequence[str]) -> RunConfig:
    """The settings; what a run would need beside its reward (a model, prompts, a batch) is not asked for."""
    reading = read(argv, add_arguments_of)
    others = {leaf.path for leaf in leaves() if leaf.section not in ("reward", "custom")}
    issues = [issue for issue in reading.issues if issue.path.partition("[")[0] not in others]
    if reading.config.reward.rm_type is None and "reward.rm_type" not in reading.unknown:
        issues = [issue for issue in issues if issue.path != "reward.rm_type"]  # rows may name theirs
    if issues:
        raise ConfigError(issues)
    return reading.config


def _one(
    own: dict[str, tuple[str, ...]], flag: str, kind: Callable[[str], T], default: Any, fits: Callable[[T], bool]
) -> Any:
    if flag not in own:
        return default
    values = own[flag]
    try:
        (text,) = values
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        problem = f"got {' '.join(values) or 'nothing'}"
        raise ConfigError([Issue(flag, problem, f"give one value that fits; see {PROG} --help")])
    return value
