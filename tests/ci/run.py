"""Runs the test modules of a suite, each in a pytest of its own: `python -m tests.ci.run --suite NAME`."""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.ci.collect import Registration, RegistrationError, collect
from tests.ci.processes import adopt_orphans, run_command
from tests.ci.register import SUITES, Suite
from tests.ci.report import Result, as_json, judge, table, wrong_estimates
from tests.ci.shards import shards

PASSED, FAILED, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 130
TAIL_LINES = 60
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}


class CannotRunError(Exception):
    """The suite cannot be run as asked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all passed, 1 some did not, 2 the suite cannot be run as asked, 130 interrupted."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _main(**vars(options))
    except RegistrationError as error:
        print(f"mistakes in the registrations of tests: {len(error.issues)}\n{error}", file=sys.stderr)
        return CANNOT_RUN
    except CannotRunError as error:
        print(error, file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(
    *,
    suite: str | None,
    shard: tuple[int, int],
    nightly: bool,
    labels: Sequence[str],
    show: bool,
    fail_fast: bool,
    timeout_factor: float,
    logs: Path,
    json_file: Path | None,
) -> int:
    if not Path("tests").is_dir():
        raise CannotRunError(f"there is no folder tests in {Path.cwd()}. Fix: run it in the root of the repository")
    everything = collect(Path.cwd())
    if show and suite is None:
        for each in SUITES.values():
            _list(each, _of_suite(everything, each, labels, nightly=True))
        return PASSED
    if suite is None:
        raise CannotRunError(f"which suite? Fix: write --suite with one of {', '.join(SUITES)}; --list shows them")
    number, count = shard
    mine = shards(_of_suite(everything, SUITES[suite], labels, nightly), count)[number - 1]
    if show:
        _list(SUITES[suite], mine)
        return PASSED
    _check_machine(SUITES[suite], mine)
    run = Run(SUITES[suite], logs / suite, timeout_factor, fail_fast)
    status = run.all(mine)
    if json_file:
        json_file.write_text(as_json(suite, f"{number}/{count}", run.results))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.ci.run", description=__doc__)
    add = parser.add_argument
    add("--suite", choices=SUITES, help="which modules to run")
    add("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N parts of the suite")
    add("--nightly", action="store_true", help="also modules registered with nightly=True")
    add("--label", dest="labels", action="append", default=[], help="only modules with this label; may be repeated")
    add("--list", dest="show", action="store_true", help="print what would run, of every suite where none is given")
    add("--fail-fast", action="store_true", help="stop after the first module that is not green")
    add("--timeout-factor", type=_positive, default=3.0, metavar="F", help="a module may take F times est_time (3)")
    add("--logs", type=Path, default=Path("runs/ci"), help="folder of pytest's output (runs/ci)")
    add("--json", dest="json_file", type=Path, metavar="FILE", help="write the table for programs")
    return parser


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is no part of a whole; write 1/4 for the first of four")
    return int(match[1]), int(match[2])


def _positive(text: str) -> float:
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is no number above 0")


def _interrupt(number: int, frame: object) -> None:
    """The first interrupt ends the run; more of them would only leave processes behind."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _of_suite(
    everything: Sequence[Registration], suite: Suite, labels: Sequence[str], nightly: bool
) -> list[Registration]:
    """The modules of a suite that are asked for."""
    known = {label for entry in everything for label in entry.labels}
    for label in labels:
        if label not in known:
            raise CannotRunError(
                f"no module has the label {label}. Fix: there are {', '.join(sorted(known)) or 'none'}"
            )
    return [
        entry
        for entry in everything
        if entry.suite == suite.name
        and (nightly or not entry.nightly)
        and (not labels or set(labels) & set(entry.labels))
    ]


def _list(suite: Suite, entries: Sequence[Registration]) -> None:
    seconds = sum(entry.est_time for entry in entries if not entry.disabled)
    print(f"{suite.name}: {len(entries)} modules, about {seconds:.0f} s; needs {suite.needs}; {suite.holds}")
    for entry in entries:
        words = [*entry.labels, *(["nightly"] if entry.nightly else [])]
        words += [f"disabled: {entry.disabled}"] if entry.disabled else []
        print(f"  {entry.est_time:6.0f} s  {entry.file}" + (f"  ({', '.join(words)})" if words else ""))


def _check_machine(suite: Suite, entries: Sequence[Registration]) -> None:
    """Nothing to run, or too few GPUs, is no success."""
    if not entries:
        raise CannotRunError(f"no module of {suite.name} is asked for. Fix: --list shows what each suite holds")
    there = _visible_gpus() if suite.gpus else 0
    if there < suite.gpus:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen!r})"
        cpu = [other.name for other in SUITES.values() if not other.gpus]
        raise CannotRunError(
            f"{suite.name} needs {suite.needs}: {suite.gpus} GPUs must be visible, nvidia-smi and "
            f"CUDA_VISIBLE_DEVICES show {there}{because}. Fix: run it there, or run {' or '.join(cpu)} here"
        )


def _visible_gpus() -> int:
    """GPUs that a process started here could use."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    there = sum(line.startswith("GPU ") for line in listed.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    names = [name.strip() for name in chosen.split(",")]
    usable = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(there, usable)


class Run:
    """One pass over modules, and what came of it."""

    def __init__(self, suite: Suite, logs: Path, timeout_factor: float, fail_fast: bool) -> None:
        self.suite = suite
        self.logs = logs
        self.timeout_factor = timeout_factor
        self.fail_fast = fail_fast
        self.results: list[Result] = []

    def all(self, entries: Sequence[Registration]) -> int:
        """Run each, print the table; returns the exit status."""
        self.logs.mkdir(parents=True, exist_ok=True)
        adopt_orphans()
        interrupted = False
        for number, entry in enumerate(entries, 1):
            if interrupted or (self.fail_fast and not all(result.good for result in self.results)):
                result = Result(entry, "not run")
            elif entry.disabled:
                result = Result(entry, "disabled", note=entry.disabled)
            else:
                try:
                    print(f"[{number}/{len(entries)}] {entry.file} (estimate {entry.est_time:.0f} s)", flush=True)
                    result = self._one(entry)
                except KeyboardInterrupt:
                    interrupted = True
                    result = Result(entry, "interrupted")
            self.results.append(result)
        print("\n".join(["", table(self.results), *wrong_estimates(self.results)]))
        if interrupted:
            return INTERRUPTED
        return PASSED if all(result.good for result in self.results) else FAILED

    def _one(self, entry: Registration) -> Result:
        name = entry.file.removesuffix(".py").replace("/", ".")
        log, junit = self.logs / f"{name}.log", self.logs / f"{name}.xml"
        junit.unlink(missing_ok=True)
        limit_s = entry.est_time * self.timeout_factor
        ended = run_command(self._command(entry, junit), env=_environment(), log=log, limit_s=limit_s)
        result = judge(entry, ended, junit, limit_s)
        if not result.good:
            tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            print("\n".join([*tail, f"--- the end of {log}: {result.result}, {result.note}"]))
        return result

    def _command(self, entry: Registration, junit: Path) -> list[str]:
        """pytest with options of its own: on a GPU machine there may be neither its plugins nor what a conftest wants."""
        command = [sys.executable, "-m", "pytest", entry.file, "-v", "-ra", "--durations=10", f"--junitxml={junit}"]
        command += ["-o", "addopts=", "-m", entry.markers]
        return [*command, "--noconftest"] if self.suite.gpus else command


def _environment() -> dict[str, str]:
    path = [str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main())
