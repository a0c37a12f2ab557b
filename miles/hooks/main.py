"""The verb: list every hook, or try one and tell what is to be mended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from miles.config.dump import dump
from miles.config.schema import RunConfig
from miles.core.hook_contracts import HOOKS
from miles.core.plugins import check_signature, hooks_of, is_async, load_function
from miles.errors import HookError
from miles.hooks.findings import DATA, LOADS, SIGNATURE, Finding
from miles.hooks.options import HELP, Examination, flag_of, read_check, read_config
from miles.hooks.places import place_of
from miles.utils.process import die_with_parent, last_lines
from miles.utils.verb import run_verb

START_S = 120.0
"""Seconds for what comes before the tests: imports of the author's module, and the run's data."""
GRACE_S = 5.0
PREPARATIONS = ("", LOADS, SIGNATURE, DATA)
_POLL_S = 0.02


def main(argv: Sequence[str]) -> int:
    """Run `miles hooks ...`; returns the exit status."""
    return run_verb(argv, _read, lambda work: work(), help_text=HELP)


def _read(argv: Sequence[str]) -> Callable[[], int]:
    if list(argv[:1]) == ["check"]:
        return partial(check, read_check(argv[1:]))
    return partial(list_hooks, read_config(argv))


def list_hooks(config: RunConfig) -> int:
    """Print every hook and what the settings load for it; 1 when something does not load."""
    used: dict[str, list[tuple[str, str]]] = {}
    for contract, path in hooks_of(config):
        used.setdefault(flag_of(contract), []).append((contract.path, path))
    lines: list[str] = []
    problems = 0
    kind = ""
    for flag, contract in HOOKS.items():
        if contract.kind != kind:
            kind = contract.kind
            lines += ["", kind]
        lines.append(f"  {flag}")
        lines += [f"      {form.strip()}" for form in contract.example.split("  or  ")]
        lines.append(f"      {contract.called}")
        for setting, path in used.get(flag, []):
            text, ok = _loaded(flag, path)
            problems += not ok
            lines.append(f"      {setting}: {text}" if setting != contract.path else f"      loads {text}")
    if problems:
        lines += ["", f"{problems} of them cannot be used; `miles train` would refuse to start"]
    sys.stdout.write("\n".join(lines).lstrip("\n") + "\n")
    return 1 if problems else 0


def _loaded(flag: str, path: str) -> tuple[str, bool]:
    try:
        fn = load_function(path)
        form = check_signature(fn, HOOKS[flag], path)
    except HookError as error:
        return f"{path}: {error.problem}\n          mend: {error.fix}", False
    kind = "class" if form == "class" else "async function" if is_async(fn) else "function"
    return f"{path}: {kind}, {place_of(fn)}", True


def check(examination: Examination) -> int:
    """Run the contract tests and print what was found; 1 when something is to be mended."""
    out = sys.stdout
    out.write(f"{examination.path} as {examination.flag} ({examination.told_by})\n")
    outcome = _tried(examination)
    width = max(len(f.test) for f in outcome.findings)
    for finding in outcome.findings:
        first, *more = finding.found.split("\n")
        if finding.mend:
            more.append(f"mend: {finding.mend}")
        out.write(f"  {finding.test:<{width}}  {finding.verdict:<7}  {first}".rstrip() + "\n")
        out.writelines(f"      {line.strip()}\n" for line in more)
    failing = sum(f.verdict == "FAILS" for f in outcome.findings)
    if outcome.printed:
        out.write(f"it printed:\n{outcome.printed}\n")
    out.write(f"{failing} to mend\n" if failing else "nothing to mend\n")
    return 1 if failing else 0


@dataclass(slots=True)
class Outcome:
    """What the process found before it ended, or was ended."""

    findings: list[Finding] = field(default_factory=list[Finding])
    running: str = ""
    """The test that had begun last and has no finding."""
    ended: bool = False
    printed: str = ""

    def take(self, row: dict[str, Any]) -> None:
        """A line of the process."""
        if "begin" in row:
            self.running = row["begin"]
        elif "finding" in row:
            self.findings.append(Finding(**row["finding"]))
            self.running = ""
        else:
            self.ended = True


def _tried(examination: Examination) -> Outcome:
    """Run the tests in a process group of their own, which is ended with all that the function started."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="miles-hooks-") as name:
        work = Path(name)
        (work / "config.yaml").write_text(dump(examination.config), encoding="utf-8")
        task = {
            "path": examination.path,
            "flag": examination.flag,
            "samples": examination.samples,
            "timeout_s": examination.timeout_s,
        }
        (work / "task.json").write_text(json.dumps(task), encoding="utf-8")
        (work / "findings.jsonl").touch()
        with open(work / "log.txt", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "miles.hooks.child", name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            silent_for = _follow(process, work / "findings.jsonl", outcome, examination.timeout_s)
        finally:
            status = _ended_with(process)
        outcome.printed = last_lines(work / "log.txt")
    if not outcome.ended:
        _tell_end(outcome, status, silent_for)
    return outcome


def _follow(process: subprocess.Popen[bytes], path: Path, outcome: Outcome, timeout_s: float) -> float:
    """Read findings until the process ends or is silent for too long; returns for how long it was silent at the end."""
    last = time.monotonic()
    with path.open(encoding="utf-8") as file:
        part = ""
        while not outcome.ended:
            has_ended = _has_ended(process)
            text = file.read()
            *lines, part = (part + text).split("\n")
            for line in lines:
                outcome.take(json.loads(line))
            limit_s = START_S if outcome.running in PREPARATIONS else timeout_s + GRACE_S
            if text:
                last = time.monotonic()
            elif has_ended or time.monotonic() - last > limit_s:
                break
            time.sleep(_POLL_S)
    return time.monotonic() - last


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without reaping it: until then its number is the group's and nobody else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ended_with(process: subprocess.Popen[bytes]) -> int | None:
    """End the process and what it started, which are one group; the status it ended with by itself, or None."""
    had_ended = _has_ended(process)
    os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    return status if had_ended else None


def _tell_end(outcome: Outcome, status: int | None, silent_for: float) -> None:
    if status is None:
        found = f"did not come back for {silent_for:.0f} s, and holds up its process; it was ended"
        mend = "give every wait a limit; await, or make it a plain `def` if it blocks"
    else:
        found = f"ended its process with status {status}"
        mend = "raise an error, in place of sys.exit or os._exit; see what it printed"
    outcome.findings.append(Finding(test=outcome.running or "ends", verdict="FAILS", found=found, mend=mend))


def _python_path() -> str:
    """Where this process finds modules: the working directory, Miles, and what the author set."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([os.getcwd(), root, *filter(None, [os.environ.get("PYTHONPATH")])])
