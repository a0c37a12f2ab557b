"""Whether the reward of a run can grade against the labels of a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from miles.core.samples import Sample
from miles.errors import DataError
from miles.rollout.rm_hub.graders import LabelError
from miles.rollout.rm_hub.hub import RewardHub
from miles.rollout.rm_hub.labels import reward_type_problem

ANSWER = r"\boxed{0}"
"""What is graded: any answer does, since a label that cannot be read is an error whatever the answer is."""
IN_FLIGHT, LIMIT_S = 64, 120.0


async def label_problems(
    args: Any, labels: Iterable[tuple[int, Any, dict[str, Any]]], path: str
) -> tuple[list[DataError], int]:
    """The labels, given as (line, label, metadata), that `--rm-type` cannot grade against; and how many were looked at.

    Those that are not looked at within two minutes are left out.
    """
    hub, ends_at = RewardHub(args), time.monotonic() + LIMIT_S
    problems: list[DataError] = []
    looked_at = 0

    async def look(line: int, label: Any, metadata: dict[str, Any]) -> None:
        nonlocal looked_at
        looked_at += 1
        if problem := reward_type_problem(metadata.get("rm_type") or args.rm_type):
            problems.append(DataError(path, problem, "mend or remove the row", line=line))
            return
        try:
            await hub.grade(Sample(response=ANSWER, label=label, metadata=metadata))
        except DataError as error:
            if not isinstance(error.__cause__, LabelError):
                raise
            problems.append(DataError(path, str(error.__cause__), error.fix, line=line))

    waiting = iter(labels)
    try:
        while time.monotonic() < ends_at and (batch := [x for x, _ in zip(waiting, range(IN_FLIGHT), strict=False)]):
            await asyncio.gather(*(look(*item) for item in batch))
    finally:
        await hub.close()
    return sorted(problems, key=lambda error: error.line or 0), looked_at
