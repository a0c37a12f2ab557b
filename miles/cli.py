"""The console script: `miles VERB ...`. A verb imports what it needs when it runs."""

from __future__ import annotations

import importlib
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCRIPTS = {"train": "train.py"}
"""Verbs that are scripts of the repository."""
VERBS = {
    "verify-resume": "miles.verify_resume.main",
    "doctor": "miles.doctor.main",
    "parity": "miles.parity.main",
    "data": "miles.data_check.main",
    "reward": "miles.reward_check.main",
    "hooks": "miles.hooks.main",
}
"""Verbs, and the modules whose `main(argv)` returns the exit status."""

USAGE = """usage: miles VERB ...

  miles train [RECIPE.yaml ...] [--flag value ...]   train a model; `miles train --help` lists every setting
  miles verify-resume [RECIPE.yaml ...] [--flag value ...]   kill a run, resume it, and compare
  miles doctor loss [RECIPE.yaml ...] [--flag value ...]   prove that the loss does not depend on how work is split
  miles parity [RECIPE.yaml ...] [--flag value ...]   how far engines and trainer are apart in log-probabilities
  miles data check FILE [RECIPE.yaml ...] [--flag value ...]   look at every row of a data file
  miles reward check FILE [RECIPE.yaml ...] [--flag value ...]   grade saved responses again, and compare
  miles hooks [check IMPORT.PATH] [RECIPE.yaml ...] [--flag value ...]   list functions of yours, or try one
  miles --version
"""


def main() -> None:
    """Run the verb of the command line and exit with its status."""
    argv = sys.argv[1:]
    if argv == ["--version"]:
        print(f"miles {version('miles')}")
        return
    if argv[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return
    if argv and argv[0] in VERBS:
        verb: Any = importlib.import_module(VERBS[argv[0]])
        raise SystemExit(verb.main(argv[1:]))
    if not argv or argv[0] not in SCRIPTS:
        found = f"no verb {argv[0]!r}\n" if argv else ""
        print(f"{found}{USAGE}", end="", file=sys.stderr)
        raise SystemExit(2)
    entry = Path(__file__).resolve().parents[1] / SCRIPTS[argv[0]]
    sys.argv = [str(entry), *argv[1:]]
    runpy.run_path(str(entry), run_name="__main__")


if __name__ == "__main__":
    main()
