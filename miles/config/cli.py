"""The command line of an entry point: `--help`, `--dry-run`, and errors as a message and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from miles.config.hook_flags import HookArguments
from miles.config.load import read
from miles.config.preflight import preflight
from miles.config.schema import RunConfig
from miles.errors import ConfigError

USAGE_ERROR = 2
"""Exit status of a configuration with problems."""


def parse(argv: Sequence[str], hook_arguments: HookArguments | None = None, prog: str = "train.py") -> RunConfig:
    """The configuration of a run that can start: read, checked, and its files and machine looked at.

    Ends the process (SystemExit) with status 0 after `--help` or `--dry-run`, and with 2 and a message on stderr when
    there are problems, all of them at once.
    """
    if "--help" in argv or argv[:1] == ["-h"]:
        from miles.config.help_text import help_text

        sys.stdout.write(help_text(prog))
        raise SystemExit(0)
    dry = "--dry-run" in argv
    reading = read([word for word in argv if word != "--dry-run"], hook_arguments)
    issues = [*reading.issues, *preflight(reading.config, reading.unknown)]
    if issues:
        _fail(ConfigError(issues), "" if argv else _first_words(prog))
    if dry:
        sys.stdout.write(_dry_run(reading.config))
        raise SystemExit(0)
    return reading.config


def _dry_run(cfg: RunConfig) -> str:
    from miles.config.dump import dump
    from miles.config.memory_text import describe_memory
    from miles.config.plan import describe_plan

    lines = "".join(f"#   {line}\n" for line in describe_plan(cfg))
    memory = "".join(f"#   {line}\n" for line in describe_memory(cfg))
    return (
        f"{dump(cfg)}\n# What will be started, and where:\n{lines}# Memory that it takes, predicted, in GiB:\n{memory}"
    )


def _first_words(prog: str) -> str:
    """For whoever gives nothing at all: how it is called, and where every setting is listed."""
    from miles.config.help_text import USAGE

    return f"{USAGE.format(prog=prog)}\n`--help` lists every setting; `--dry-run` shows a run without starting it.\n\n"


def _fail(error: ConfigError, before: str = "") -> NoReturn:
    sys.stderr.write(f"{before}{error}\n")
    raise SystemExit(USAGE_ERROR)
