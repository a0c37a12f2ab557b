"""What came of each test module: a table for people, JSON for programs."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.ci.collect import Registration
from tests.ci.processes import Ended
from tests.ci.register import SUITES

GOOD = ("passed", "skipped", "disabled")
"""Results that leave the suite green."""
OFF_BY = 2.0
"""An estimate that is wrong by more than this factor is reported."""
OFF_AT_LEAST_S = 5.0
"""Differences below this many seconds are not."""
NO_TESTS_COLLECTED = 5
"""pytest's exit status."""


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    entry: Registration
    result: str
    seconds: float | None = None
    """None where the module did not run."""
    note: str = ""

    @property
    def good(self) -> bool:
        return self.result in GOOD


def judge(entry: Registration, ended: Ended, junit: Path, limit_s: float) -> Result:
    """The result of a module that ran."""
    counts = _counts(junit)
    note = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    if ended.timed_out:
        result, note = "timed out", f"stopped after its limit of {limit_s:.0f} s"
    elif ended.status == 0 and counts.get("passed"):
        result = "passed"
    elif ended.status == 0 and SUITES[entry.suite].gpus:
        result, note = "nothing ran", f"{note or 'no test'} in a suite of GPUs"
    elif ended.status == 0:
        result = "skipped"
    elif ended.status == NO_TESTS_COLLECTED:
        result, note = "nothing ran", "pytest found no test"
    elif ended.status < 0:
        result, note = "failed", f"ended by signal {-ended.status}"
    else:
        result, note = "failed", note or f"pytest ended with {ended.status}"
    if ended.strays:
        note += f"; left {len(ended.strays)} processes, which were killed: {ended.strays[0][:60]}"
    return Result(entry, result, ended.seconds, note)


def _counts(junit: Path) -> dict[str, int]:
    try:
        suite = ElementTree.parse(junit).getroot().find("testsuite")
    except (OSError, ElementTree.ParseError):  # pytest did not come to its end
        return {}
    if suite is None:
        return {}
    total, failed, broken, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    return {"passed": total - failed - broken - skipped, "failed": failed, "errors": broken, "skipped": skipped}


def table(results: Sequence[Result]) -> str:
    """Module, seconds, estimate, result: in the order in which they ran."""
    rows = [("module", "seconds", "estimate", "result", "")]
    for result in results:
        seconds = "-" if result.seconds is None else f"{result.seconds:.1f}"
        rows.append((result.entry.file, seconds, f"{result.entry.est_time:.0f}", result.result, result.note))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    )


def wrong_estimates(results: Sequence[Result]) -> list[str]:
    """For each module that took far longer or shorter than said: where, and the line to write."""
    found = []
    for result in results:
        entry, seconds = result.entry, result.seconds
        if seconds is None or result.result != "passed" or abs(seconds - entry.est_time) < OFF_AT_LEAST_S:
            continue
        if entry.est_time / OFF_BY <= seconds <= entry.est_time * OFF_BY:
            continue
        rounded = f"est_time={max(1, round(seconds))}"
        if entry.line:
            found.append(
                f"{entry.file}:{entry.line}: est_time={entry.est_time:g} took {seconds:.1f} s: write {rounded}"
            )
        elif seconds > entry.est_time:
            call = f'register_cpu_ci({rounded}, suite="{entry.suite}")'
            found.append(
                f"{entry.file}: took {seconds:.1f} s, thought to take {entry.est_time:g}: write {call} after its imports"
            )
    return found


def as_json(suite: str, shard: str, results: Sequence[Result]) -> str:
    """The table for programs; seconds are null where a module did not run."""
    rows = [
        {**asdict(r.entry), "result": r.result, "seconds": r.seconds, "note": r.note, "good": r.good} for r in results
    ]
    return json.dumps({"suite": suite, "shard": shard, "results": rows}, indent=2) + "\n"
