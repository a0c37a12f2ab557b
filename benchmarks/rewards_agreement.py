"""How far math-verify agrees with the table of verdicts in tests/fast/rewards/math_verdicts.py, and with the `math` reward.

    python benchmarks/rewards_agreement.py

It prints every row on which math-verify gives another verdict, group by group. docs/user-guide/rewards-maths.md argues them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from math_verify import parse, verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles.rollout.rm_hub.math_rewards import MathGrader
from tests.fast.rewards.math_verdicts import VERDICTS

logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def by_math_verify(response: str, label: str) -> int:
    """The verdict of its documented use: the label in dollar signs, as a whole; gold first. What it cannot do in 5 s is 0."""
    gold = parse(f"${label}$")
    return int(bool(gold) and verify(gold, parse(response)))


async def main() -> None:
    grader = MathGrader(timeout_s=30, num_workers=1)
    totals = {"rows": 0, "math": 0, "math-verify": 0}
    for group, rows in VERDICTS.items():
        differences = []
        for answer, label, verdict in rows:
            response = answer if group == "mixed text" else rf"\boxed{{{answer}}}"
            ours, theirs = await grader.grade(response, label), by_math_verify(response, label)
            totals["rows"] += 1
            totals["math"] += ours == verdict
            totals["math-verify"] += theirs == verdict
            if theirs != verdict:
                differences.append(f"  {answer!r} for {label!r}: {theirs}, by mathematics {verdict}")
        print(f"{group}: {len(rows)} rows, math-verify differs on {len(differences)}", *differences, sep="\n")
    grader.close()
    print(
        f"agreement with the table of {totals['rows']}: math {totals['math']}, math-verify {totals['math-verify']} "
        f"({totals['math-verify'] / totals['rows']:.1%})"
    )


if __name__ == "__main__":
    asyncio.run(main())
