"""Command line of `miles data check`: its own flags, and those of the run that would read the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles.config.command_line import split
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.preflight import chat_template_exists, prompts_exist
from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.core.plugins import add_arguments_of
from miles.errors import ConfigError, Issue

PROG = "miles data check"
USAGE = f"usage: {PROG} FILE [FILE ...] [RECIPE.yaml ...] [--flag value ...]"
HELP = f"""{USAGE}

Reads every row of the files as a run with these settings would, and tells: rows, keys and their types, lengths after the
chat template, prompts that would be dropped, duplicates, three prompts as the model sees them, and every row that a run
would refuse, with its line. FILE is .jsonl or .parquet; FILE@[a:b] takes rows a to b. Without a FILE, the recipes'
--prompt-data is read.

Takes every flag of `miles train`. Those that matter: --input-key, --label-key, --metadata-key, --tool-key,
--multimodal-keys, --hf-checkpoint (its tokenizer and template; without it no lengths), --chat-template-path,
--apply-chat-template, --apply-chat-template-kwargs, --rollout-max-prompt-len, --rollout-max-context-len, --loss-type, and
--rm-type (whether it can grade against the labels); and

  --show N       problems to print; default 20
  --json FILE    write the result there as JSON

Exit status: 0 a run would take every row, 1 it would refuse some, 2 the command line is wrong.
"""
OWN = ("--show", "--json")
SECTIONS = {"data", "model", "custom"}
"""Settings whose issues matter here; a run's length, say, is not asked for."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be checked, and how."""

    config: RunConfig
    show: int
    json_path: Path | None


def read_options(argv: Sequence[str]) -> Options:
    """Read the command line after the verb; raises ConfigError with everything that is wrong."""
    words, given = split(argv)
    recipes = [word for word in words if word.endswith((".yaml", ".yml"))]
    files = [word for word in words if word not in recipes]
    own: dict[str, tuple[str, ...]] = {}
    rest = list(recipes)
    for item in given:
        if item.flag in OWN:
            own[item.flag] = item.values
        elif len(item.values) == 1 and item.values[0].startswith("-"):
            rest.append(f"{item.flag}={item.values[0]}")
        else:
            rest += [item.flag, *item.values]
    if files:
        rest += ["--prompt-data", *files]
    json_path = _one(own, "--json", Path, None)
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError([Issue("--json", f"{json_path.parent}: no such folder", "make the folder first")])
    show = _one(own, "--show", int, 20)
    if show < 0:
        raise ConfigError([Issue("--show", f"{show} is negative", "a number from 0")])
    return Options(config=_config(rest), show=show, json_path=json_path)


def _config(argv: Sequence[str]) -> RunConfig:
    reading = read(argv, add_arguments_of)
    elsewhere = {leaf.path for leaf in leaves() if leaf.section not in SECTIONS}
    # What fills in the pictures or grades the answers may not be decided yet.
    undecided = {"data.label_key", "data.multimodal_keys"}
    issues = [
        issue
        for issue in reading.issues
        if issue.path.partition("[")[0] not in elsewhere | undecided or issue.path in reading.unknown
    ]
    issues += run_checks([prompts_exist, chat_template_exists], reading.config, reading.unknown)
    if issues:
        raise ConfigError(issues)
    return reading.config


def _one(own: dict[str, tuple[str, ...]], flag: str, kind: Callable[[str], T], default: T | None) -> T:
    if flag not in own:
        return default  # pyright: ignore[reportReturnType]
    try:
        (text,) = own[flag]
        return kind(text)
    except ValueError:
        problem = f"got {' '.join(own[flag]) or 'nothing'}"
        raise ConfigError([Issue(flag, problem, f"give one value; see {PROG} --help")]) from None
