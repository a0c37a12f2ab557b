"""The `code` reward: a program that a model wrote passes the row's unit tests, or not."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from miles.core.samples import Sample
from miles.errors import HookError
from miles.rollout.rm_hub.code_tests import CodeTest, extract_code, passes, read_tests
from miles.rollout.rm_hub.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_SANDBOX = f"{Path(__file__).with_name('code_sandbox.py')}:run"
_WANTED = {"user", "net", "ipc", "mount", "pid"}
_START_S = 10.0
_MOST_WALL = 5.0
_SLICE_S = 0.5
_MOST_SOURCE = 1 << 20
_LEAST_OUTPUT = 1 << 18


class CodeGrader:
    """Runs the last Python block of a response against the tests of its row, each test in a process of its own.

    1.0 when all tests pass and 0.0 otherwise, and then the tests after the first that fails are not run; with
    `partial_credit` the fraction of tests passed. A test fails when its program ends with another status than 0, leaves
    a traceback on standard error, or gives something else than expected. One that uses up `time_s` of processor time
    fails too, and so do those after a sample's tests have used up `sample_s` together; both are counted.

    What keeps the programs apart from everything else depends on the machine; docs/user-guide/rewards-code.md says what
    holds where, and a line of the log what holds here.
    """

    def __init__(
        self,
        *,
        sample_s: float,
        num_workers: int,
        time_s: float,
        memory_bytes: int,
        partial_credit: bool,
        level: str = "auto",
    ) -> None:
        """`level`: `auto` takes every protection that the machine allows, `basic` those that all allow."""
        self._sample_s, self._partial = sample_s, partial_credit
        self._root = tempfile.mkdtemp(prefix="miles-code-")
        os.chmod(self._root, 0o711)  # programs of another user reach their own folder in it
        self._limits: dict[str, Any] = {
            "time_s": time_s,
            "memory_bytes": memory_bytes,
            "output_bytes": _LEAST_OUTPUT,
            "file_bytes": 64 << 20,
            "open_files": 64,
            "processes": 64,
            "level": level,
            "root": self._root,
        }
        self._pool = WorkerPool(
            _SANDBOX,
            size=num_workers,
            timeout_s=_MOST_WALL * time_s + _START_S,
            slice_s=_SLICE_S,
            memory_bytes=memory_bytes + (1 << 30),
            clean=True,
        )
        self._ends: Counter[str] = Counter()
        self._told = False

    async def grade_sample(self, response: str, sample: Sample) -> float:
        """The reward. Raises LabelError for tests that cannot be read, HookError when the sandbox itself fails."""
        tests = read_tests(sample.label, sample.metadata)
        source = extract_code(response)
        if not source.strip() or len(source) > _MOST_SOURCE:
            return 0.0
        passed, left_s = 0, self._sample_s
        for test in tests:
            if left_s <= 0:
                self._ends["sample_time"] += 1
                break
            good, seconds = await self._run(source, test)
            left_s -= seconds
            passed += good
            if not good and not self._partial:
                break
        return passed / len(tests) if self._partial else float(passed == len(tests))

    async def _run(self, source: str, test: CodeTest) -> tuple[bool, float]:
        limits = {**self._limits, "output_bytes": max(_LEAST_OUTPUT, 2 * test.expected_bytes)}
        outcome = await self._pool.run(source, test.stdin, test.ask, limits)
        if outcome.value is None:
            self._ends["worker" if outcome.crashed else "time"] += 1
            return False, self._limits["time_s"]
        result = outcome.value
        if not self._told:
            self._tell(set(result["holds"]))
        if result["end"] == "sandbox":
            raise HookError("--rm-type code", f"a program could not be shut in: {result['stderr']:.300}")
        self._ends[result["end"]] += 1
        judge = asyncio.to_thread(passes, test, result) if _is_large(result) else None
        return passes(test, result) if judge is None else await judge, result["seconds"]

    def _tell(self, holds: set[str]) -> None:
        self._told = True
        missing = _WANTED - holds
        if missing:
            logger.warning(
                "code reward: programs run without the protections %s, which this machine does not allow; see "
                "docs/user-guide/rewards-code.md",
                ", ".join(sorted(missing)),
            )
        else:
            logger.info("code reward: programs run with the protections %s", ", ".join(sorted(holds)))

    def metrics(self) -> dict[str, float]:
        """Programs by how they ended, under `rollout/code/`, and those that took too long."""
        return {
            "rollout/reward_timeouts": float(self._ends["time"] + self._ends["sample_time"]),
            "rollout/reward_crashes": float(self._ends["worker"]),
            **{f"rollout/code/{end}": float(self._ends[end]) for end in ("exit", "signal", "output", "processes")},
        }

    def close(self) -> None:
        """End every process and remove what is left of their folders."""
        self._pool.close()
        shutil.rmtree(self._root, ignore_errors=True)


def _is_large(result: dict[str, Any]) -> bool:
    return len(result["stdout"]) + len(result["report"]) > _LEAST_OUTPUT // 4
