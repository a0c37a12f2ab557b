"""What a contract test found, as lines of JSON between the process that runs it and the one that tells."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import IO, Literal

LOADS, SIGNATURE, DATA = "loads", "has the signature", "has something to be tried on"
"""The tests that come before those of the kind of hook."""
Verdict = Literal["ok", "FAILS", "note", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One contract test and how it came out."""

    test: str
    verdict: Verdict
    found: str = ""
    mend: str = ""
    """What to change; empty where nothing fails."""


class Report:
    """Writes findings as they come, so that the owner knows what ran when a function hangs or ends the process."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._test = ""

    def begin(self, test: str) -> None:
        """The test that runs from here on."""
        self._test = test
        self._write({"begin": test})

    def ok(self, found: str = "") -> None:
        """The running test passes."""
        self._add(Finding(test=self._test, verdict="ok", found=found))

    def fails(self, found: str, mend: str) -> None:
        """The running test fails."""
        self._add(Finding(test=self._test, verdict="FAILS", found=found, mend=mend))

    def note(self, found: str) -> None:
        """The running test found something that is allowed, and worth knowing."""
        self._add(Finding(test=self._test, verdict="note", found=found))

    def not_run(self, found: str) -> None:
        """The running test could not be made."""
        self._add(Finding(test=self._test, verdict="not run", found=found))

    def end(self) -> None:
        """Everything ran."""
        self._write({"end": True})

    def _add(self, finding: Finding) -> None:
        self._write({"finding": asdict(finding)})

    def _write(self, row: dict[str, object]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
