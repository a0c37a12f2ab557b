"""Command line of `miles parity`: its own flags, and those of the run whose engines and trainer are compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles.config.checks_gpu import heads_are_shared_evenly, sglang_can_start
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.preflight import model_is_complete
from miles.config.schema import RunConfig
from miles.core.plugins import add_arguments_of
from miles.errors import ConfigError, Issue
from miles.utils.model_dtype import model_config

PROG = "miles parity"
NUM_PROMPTS = 16
PROMPT_LENGTHS = (32,)
TIMEOUT_S = 600.0
USAGE = f"usage: {PROG} [RECIPE.yaml ...] [--flag value ...]"
HELP = f"""{USAGE}

Generates with the run's engine, scores what it sampled by the run's trainer, and shows how far their log-probabilities
are apart: for each of the --engine settings with each of the --trainer settings. Says which bounds of the parity gate
would fit. Engines and trainers take turns, so one GPU is enough. Ray, rewards and evaluation data are not needed.

Takes every flag of `miles train`, and

  --engine 'FLAGS'       settings of an engine, such as '--sglang-dtype float32'; may be given several times
  --trainer 'FLAGS'      settings of a trainer, such as '--bf16'; may be given several times
  --num-prompts N        responses to compare; default {NUM_PROMPTS}
  --prompt-lengths N ... prompts of so many random tokens, in turn, with responses of the full length; without it the
                         prompts are those of --prompt-data, or of {PROMPT_LENGTHS[0]} random tokens
  --timeout S            seconds that a trainer may take to start and score; default {TIMEOUT_S:.0f}
  --json FILE            write the result there as JSON

Exit status: 0 every pair is within its gate, 1 one is beyond or failed, 2 the command line or recipe is wrong.
"""
ONE, MANY = ("--engine", "--trainer", "--num-prompts", "--timeout", "--json"), "--prompt-lengths"
UNUSED = ("reward.", "data.", "eval.", "checkpoint.", "debug.", "algorithm.", "correction.", "optimizer.", "critic.")
"""Beginnings of settings that neither generation nor scoring reads, so that what is wrong with them is left to the run."""
LENGTH = ("rollout.num_rollout", "rollout.num_epoch")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Settings of an engine or a trainer: the flags as given, and the configuration with them."""

    flags: str
    config: RunConfig

    @property
    def name(self) -> str:
        return self.flags or "as the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is to be compared with what."""

    engines: tuple[Side, ...]
    trainers: tuple[Side, ...]
    pairs: dict[tuple[int, int], RunConfig]
    """The whole configuration of each pair, by the numbers of engine and trainer; its gate's bounds follow from it."""
    num_prompts: int
    prompt_lengths: tuple[int, ...]
    """Random prompts of these lengths, in turn; empty takes the run's data."""
    timeout_s: float
    json_path: Path | None


def read_options(argv: Sequence[str]) -> Comparison:
    """Read the command line, and look at the model folder; raises ConfigError with everything that is wrong."""
    rest, own = _split(argv)
    num_prompts = _number(own, "--num-prompts", int, NUM_PROMPTS)
    timeout_s = _number(own, "--timeout", float, TIMEOUT_S)
    lengths = [_at_least_1(MANY, word, int) for words in own.get(MANY, []) for word in words]
    json_path = Path(own["--json"][-1][0]) if "--json" in own else None
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError([Issue("--json", f"{json_path.parent}: no such folder", "make the folder first")])
    words = {side: _sides(own, side) for side in ("--engine", "--trainer")}
    engines, trainers = (
        tuple(Side(flags=shlex.join(one), config=_configure([*rest, *one])) for one in words[side])
        for side in ("--engine", "--trainer")
    )
    pairs = {
        (e, t): _configure([*rest, *engine, *trainer])
        for e, engine in enumerate(words["--engine"])
        for t, trainer in enumerate(words["--trainer"])
    }
    config = engines[0].config
    if MANY not in own and (not config.data.prompt_data or config.algorithm.loss_type == "sft_loss"):
        lengths = list(PROMPT_LENGTHS)
    if lengths and not isinstance(model_config(config.model.hf_checkpoint).get("vocab_size"), int):
        problem = f"{config.model.hf_checkpoint}/config.json names no vocab_size to draw random prompts from"
        raise ConfigError([Issue("model.hf_checkpoint", problem, "--prompt-data FILE.jsonl")])
    return Comparison(
        engines=engines,
        trainers=trainers,
        pairs=pairs,
        num_prompts=num_prompts,
        prompt_lengths=tuple(lengths),
        timeout_s=timeout_s,
        json_path=json_path,
    )


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[list[str]]]]:
    """The run's words, and the values of each of our own flags, once for each time that it is given."""
    rest: list[str] = []
    own: dict[str, list[list[str]]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, eq, value = word.partition("=")
        if flag in ONE:
            if not eq and not words:
                raise ConfigError([Issue(flag, "has no value", f"give one value; see {PROG} --help")])
            own.setdefault(flag, []).append([value if eq else words.pop(0)])
        elif flag == MANY:
            values = [value] if eq else []
            while words and not words[0].startswith("--"):
                values.append(words.pop(0))
            own.setdefault(flag, []).append(values)
        else:
            rest.append(word)
    return rest, own


def _sides(own: dict[str, list[list[str]]], flag: str) -> list[list[str]]:
    try:
        return [shlex.split(text) for (text,) in own.get(flag, [[""]])]
    except ValueError as error:
        raise ConfigError([Issue(flag, f"cannot be read: {error}", "close the quotes")]) from None


def _configure(argv: Sequence[str]) -> RunConfig:
    reading = read(argv, add_arguments_of)
    looks = [model_is_complete, sglang_can_start, heads_are_shared_evenly]
    found = [i for i in reading.issues if i.path not in LENGTH and not i.path.startswith(UNUSED)]
    issues = [*found, *run_checks(looks, reading.config, reading.unknown)]
    if issues:
        raise ConfigError(list(dict.fromkeys(issues)))
    return reading.config


def _number(own: dict[str, list[list[str]]], flag: str, kind: Callable[[str], T], default: T) -> T:
    return _at_least_1(flag, own[flag][-1][0], kind) if flag in own else default


def _at_least_1(flag: str, word: str, kind: Callable[[str], T]) -> T:
    try:
        value = kind(word)
    except ValueError:
        value = None
    if value is None or not value >= 1:  # pyright: ignore[reportOperatorIssue]
        raise ConfigError([Issue(flag, f"got {word!r}", "a number from 1")])
    return value
