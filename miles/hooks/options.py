"""Command line of `miles hooks`: its own flags, and those of the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from miles.config.checks import CHECKS
from miles.config.command_line import split
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.schema import RunConfig
from miles.core.hook_contracts import GROUP_REWARD, HOOKS, Contract
from miles.core.plugins import add_arguments_of, check_signature, hooks_of, load_function
from miles.errors import ConfigError, HookError, Issue

PROG = "miles hooks"
USAGE = f"""usage: {PROG} [RECIPE.yaml ...] [--flag value ...]
       {PROG} check IMPORT.PATH [RECIPE.yaml ...] [--as FLAG] [--samples FILE] [--timeout S] [--flag value ...]
"""
HELP = f"""{USAGE}
Lists every hook: flag, signature, where it is called, and what the recipe and flags load. `check` runs contract tests on
one function or class: it is called as a run calls it, in a process of its own, and what it returns, changes and raises
is judged. Takes every flag of `miles train`; with a recipe the prompts are the run's.

  --as FLAG        which hook it is, as `--as custom-rm-path`; left out, the recipe or the signature tells
  --samples FILE   try it on the samples of a file that --save-debug-rollout-data wrote
  --timeout S      seconds that one call may take; default reward.timeout_s for rewards, 30 for others

Exit status: 0 nothing to mend, 1 something is, 2 the command line or recipe is wrong.
"""
OWN = ("--as", "--samples", "--timeout")
TIMEOUT_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Which function is to be tried, as what, with which settings."""

    path: str
    flag: str
    told_by: str
    """How it is known which hook it is."""
    config: RunConfig
    samples: str | None
    timeout_s: float


def read_config(argv: Sequence[str]) -> RunConfig:
    """The settings of `argv`, which need not make a whole run; raises ConfigError for what is wrong in itself."""
    reading = read(argv, add_arguments_of)
    about_runs = run_checks(CHECKS, reading.config, reading.unknown)
    issues = [issue for issue in reading.issues if issue not in about_runs]
    if issues:
        raise ConfigError(issues)
    return reading.config


def read_check(argv: Sequence[str]) -> Examination:
    """Read the words after `miles hooks check`; raises ConfigError."""
    words, given = split(_as_joined(argv))
    if not words:
        raise ConfigError([Issue(f"{PROG} check", "names no function", f"{PROG} check my_package.rewards.score")])
    path, *rest = words
    own: dict[str, tuple[str, ...]] = {}
    for item in given:
        if item.flag in OWN:
            own[item.flag] = item.values
        elif len(item.values) == 1 and item.values[0].startswith("-"):
            rest.append(f"{item.flag}={item.values[0]}")
        else:
            rest += [item.flag, *item.values]
    config = read_config(rest)
    flag, told_by = _hook_of(path, config, _one(own, "--as", str, None))
    timeout_s = _one(own, "--timeout", float, config.reward.timeout_s if "rm-path" in flag else TIMEOUT_S)
    if not timeout_s > 0:
        raise ConfigError([Issue("--timeout", f"{timeout_s:g} s leave no time", "seconds above 0")])
    return Examination(
        path=path,
        flag=flag,
        told_by=told_by,
        config=config,
        samples=_one(own, "--samples", str, None),
        timeout_s=timeout_s,
    )


def _as_joined(argv: Sequence[str]) -> list[str]:
    """`--as --custom-rm-path` as one word, since the name of a hook looks like a flag."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--as" and word.startswith("--"):
            joined[-1] = f"--as={word}"
        else:
            joined.append(word)
    return joined


def _hook_of(path: str, config: RunConfig, named: str | None) -> tuple[str, str]:
    """The flag of the hook, and how it is known."""
    if named is not None:
        flag = f"--{named.removeprefix('--')}"
        if flag not in HOOKS:
            fix = f"one of {', '.join(f.removeprefix('--') for f in HOOKS if f != GROUP_REWARD)}"
            raise ConfigError([Issue("--as", f"{named} is no hook", fix)])
        return (GROUP_REWARD if flag == "--custom-rm-path" and config.reward.group_rm else flag), "as told"
    for contract, used in hooks_of(config):
        if used == path:
            return flag_of(contract), "by the recipe"
    return _by_signature(path), "by its signature"


def _by_signature(path: str) -> str:
    """The one hook whose call the function fits best; raises ConfigError when none or several do."""
    try:
        fn = load_function(path)
    except HookError as error:
        raise ConfigError([Issue(error.hook, error.problem, error.fix)]) from None
    scores: dict[str, int] = {}
    for flag, contract in HOOKS.items():
        if flag == "--eval-function-path":  # the same as --rollout-function-path
            continue
        try:
            form = check_signature(fn, contract, path)
        except HookError:
            continue
        scores[flag] = _likeness(fn, contract, form)
    best = [flag for flag, score in scores.items() if score == max(scores.values()) and score > 0]
    if len(best) == 1:
        return best[0]
    choices = best or list(scores)
    problem = f"could be {', '.join(choices)}" if choices else "has the signature of no hook"
    raise ConfigError([Issue(path, problem, f"say which with --as FLAG; `{PROG}` lists their signatures")])


def flag_of(contract: Contract) -> str:
    """The flag of a hook; for one of an evaluation dataset, the run's flag for the same."""
    same_path = [flag for flag, c in HOOKS.items() if c.path == contract.path and c.example == contract.example]
    return (same_path or [flag for flag, c in HOOKS.items() if c.example == contract.example])[0]


def _likeness(fn: Any, contract: Contract, form: str) -> int:
    """Parameters that have the names of the contract, less the ones it passes by name and the function does not have."""
    if form == "class":
        assert contract.methods is not None
        return len(contract.methods.required)
    call = next(call for call in contract.calls if call.name == form)
    try:
        names = list(inspect.signature(fn).parameters)
    except (ValueError, TypeError):
        return 0
    named = sum(a == b for a, b in zip(call.positional, names, strict=False))
    return named + sum(1 if name in names else -1 for name in call.keyword)


def _one(own: dict[str, tuple[str, ...]], flag: str, kind: Callable[[str], T], default: T) -> T:
    if flag not in own:
        return default
    try:
        (text,) = own[flag]
        return kind(text)
    except ValueError:
        problem = f"got {' '.join(own[flag]) or 'nothing'}"
        raise ConfigError([Issue(flag, problem, f"give one value; see {PROG} --help")]) from None
