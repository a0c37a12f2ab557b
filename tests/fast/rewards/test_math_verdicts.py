import asyncio
import re
import time
from pathlib import Path

import pytest

from miles.rollout.rm_hub.math_judge import answer_of, gold_of, judge
from miles.rollout.rm_hub.math_rewards import MathGrader
from tests.fast.rewards.math_verdicts import VERDICTS


def response_of(group, answer):
    return answer if group == "mixed text" else rf"\boxed{{{answer}}}"


# Cases A06, A07, A09, A10, A12, A13, A15, A16, A18, A21 and A34 are among the rows.
@pytest.mark.parametrize("group", VERDICTS)
def test_math_agrees_with_mathematics(group):
    grader = MathGrader(timeout_s=20, num_workers=1)

    async def verdicts():
        return [await grader.grade(response_of(group, answer), label) for answer, label, _ in VERDICTS[group]]

    found = asyncio.run(verdicts())
    grader.close()
    assert [row for row, reward in zip(VERDICTS[group], found, strict=True) if reward != row[2]] == []


def test_the_table_has_four_hundred_rows_and_its_negatives_are_near_half():
    rows = [row for group in VERDICTS.values() for row in group]
    assert len(rows) == len(set(rows)) >= 400
    assert 0.4 < sum(verdict for _, _, verdict in rows) / len(rows) < 0.6
    assert all(len(group) >= 20 for group in VERDICTS.values())


def test_the_page_counts_the_rows_and_its_snippet_runs():
    page = (Path(__file__).parents[3] / "docs" / "user-guide" / "rewards-maths.md").read_text(encoding="utf-8")
    assert f"has {sum(len(rows) for rows in VERDICTS.values())} rows" in page
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(snippet, "rewards-maths.md", "exec"), {})


def test_equality_is_symmetric_where_nothing_is_left_out():
    one_way = {
        ("polynomials", "m+n=13"), ("polynomials", "13=m+n"), ("polynomials", "x+y=2"),  # only an answer may state what it found
        ("polynomials", "5"),
    }  # fmt: skip
    for group, rows in VERDICTS.items():
        for answer, label, verdict in rows:
            if group == "mixed text" or not answer or (group, answer) in one_way:
                continue
            assert judge(label, answer) in (bool(verdict), None), (group, label, answer)


def test_no_row_needs_more_than_a_moment():
    for group, rows in VERDICTS.items():
        for answer, label, _ in rows:
            found = answer_of(response_of(group, answer))
            start = time.process_time()
            if found is not None:
                assert judge(found, gold_of(label)) is not None, "a worker would be asked"
            assert time.process_time() - start < 0.1, answer
