import asyncio
import threading
import time

import pytest

from miles.rollout.rm_hub.graders import LabelError
from miles.rollout.rm_hub.math_rewards import MathGrader

TOWER = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}"
BOLD = "We had 437 + 2*234 = 905, so the count of people with all four items is **73**.\n---\nFinal Answer: **73**"


def boxed(answer):
    return rf"Therefore \boxed{{{answer}}}."


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout_s=20, num_workers=2)
    yield grader
    grader.close()


def grade(grader, response, label):
    return asyncio.run(grader.grade(response, label))


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        # Case A06: one answer boxed twice is one answer
        (r"First guess \boxed{840}; a check follows. **Final Answer** \boxed{840}", "840", 1),
        (r"So \boxed{004} is correct. **Final Answer** \boxed{004}", "4", 1),
        (r"\boxed{840} ... \boxed{840}", "840840", 0),
        # the last of several different ones counts, with or without thinking before it
        (r"The sum is 3+4. Thus \boxed{7}", "7", 1),
        (r"<think>perhaps \boxed{3}</think> no: \boxed{7}", "7", 1),
        (r"<think>perhaps \boxed{3}</think> no: \boxed{7}", "3", 0),
        (r"draft \boxed{1} ### answer \boxed{2} ### answer \boxed{42}", "42", 1),
        (r"draft \boxed{1} ### answer \boxed{2} ### answer \boxed{42}", "2", 0),
        # Case A07: markdown around the final number
        (BOLD, "73", 1),
        (BOLD, "234", 0),
        # Case A09: no absolute tolerance near zero, and no large factorial computed slowly
        (boxed(r"\frac{1}{2006!}"), r"\frac{1}{2004!}", 0),
        (boxed(r"\frac{1}{2^{98}}"), r"\frac{1}{2^{99}}", 0),
        (boxed(r"\frac{1}{2^{99}}"), "2^{-99}", 1),
        (boxed("0.000000001"), "2e-9", 0),
        # Cases A10 and A12: nothing of an answer is ignored
        (boxed("n=1,2,3"), "n=2,3,4", 0),
        (boxed("2021"), r"\pm 2021", 0),
        (boxed("1:00"), "12:00", 0),
        (boxed("D=(0,1.5)"), "D=(0,1)", 0),
        (boxed("21, 36, and 82"), r"19, 46, \text{ and } 82", 0),
        (boxed(r"1+\frac{1}{e}"), r"1-\frac{1}{e}", 0),
        (boxed("n=2,3,4"), "2,3,4", 1),
        ("n=1,2,3", "n=2,3,4", 0),
        ("n=2,3,4", "2,3,4", 1),
        ("3x + 4y + 14=0", "3*x-1*y+13=0", 0),
        (boxed("3x + 4y + 14=0"), "3*x-1*y+13=0", 0),
        # Case A13: equal wherever both are real
        (boxed(r"\frac{1}{\sqrt{n}}"), r"\sqrt{1/n}", 1),
        (boxed("|x|"), "x", 0),
        # Cases A15, A21 and A34: labels that are plain numbers
        (boxed(r"\frac{2}{3}"), "2/3", 1),
        (boxed(r"\frac{2}{3}"), "2", 0),
        (boxed(r"\frac{64}{400}"), r"\frac{63}{400}", 0),
        ("anything", "6", 0),
        ("Answer: 0", "0.5", 0),
        ("Answer: 7", "7.5", 0),
        ("Answer: 9007199254740993", "9007199254740993", 1),
        ("Answer: 9007199254740992", "9007199254740993", 0),
        ("Answer: 42", "42.0", 1),
        ("Answer: 2/3", "2/3", 1),
        ("Answer: 12", "1.2e1", 1),
        ("Answer: 12", 12, 1),
        (boxed("0.1"), 0.1, 1),
        (boxed("0.333333"), "1/3", 1),
        (boxed("0.6667"), "2/3", 0),
        # Case A16: gold first, prediction second; the kind of an interval's end counts
        ("$(0,12.5)$", "$0<x<12.5$", 1),
        (r"$m\in[\sqrt2,\infty)$", r"\boxed{m\ge\sqrt2}", 1),
        ("$(0,12.5]$", "$(0,12.5)$", 0),
        # Case A18: too large to compute
        (boxed(TOWER), "7", 0),
        (boxed(TOWER), TOWER, 1),
        (boxed("100000000!"), "7", 0),
        # what else a grader of mathematics must know
        (boxed("x^2+2x+1"), "(x+1)^2", 1),
        (boxed(r"\text{Paris}"), "Paris", 1),
        (boxed(r"\{2,1\}"), r"\{1,2\}", 1),
        (boxed("(1,2)"), "(2,1)", 0),
        (boxed(r"50\%"), "50", 1),
        (boxed("5"), "x=5", 1),
        ("no answer here", "5", 0),
        ("", "5", 0),
    ],
)
def test_verdicts(grader, response, label, reward):
    start = time.perf_counter()
    assert grade(grader, response, label) == reward
    assert time.perf_counter() - start < 10  # the first one starts a worker


def test_none_of_these_needed_the_time_limit(grader):
    assert grade(grader, boxed(TOWER), "x") == 0
    assert grader.metrics()["rollout/reward_timeouts"] == 0


def test_a_label_that_cannot_be_read_is_an_error_and_never_a_reward(grader):
    before = grader.metrics()["rollout/reward_bad_labels"]
    for label, problem in (
        ("<unparsable gold>", "'<unparsable gold>' cannot be read as mathematics"),
        (r"\forall x>0, f(x)=0", "cannot be read as mathematics"),
    ):
        with pytest.raises(LabelError, match=problem):
            grade(grader, boxed("f(x)=0"), label)
    assert grader.metrics()["rollout/reward_bad_labels"] == before + 2
    assert grade(grader, boxed("<unparsable gold>"), "<unparsable gold>") == 1  # the same string is the same answer


@pytest.mark.parametrize(
    ("label", "problem"), [(None, "no label"), ("  ", "empty"), ([1], "is list"), ({"a": 1}, "is dict")]
)
def test_a_label_that_is_no_text_is_an_error(grader, label, problem):
    with pytest.raises(LabelError, match=problem):
        grade(grader, boxed("5"), label)


def test_many_loops_and_threads_share_one_pool(grader):
    rewards = []

    async def judge_many():
        return await asyncio.gather(*(grader.grade(boxed(rf"\frac{{{2 * i}}}{{2}}"), str(i)) for i in range(5)))

    threads = [threading.Thread(target=lambda: rewards.extend(asyncio.run(judge_many()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rewards == [1.0] * 20
    assert 1 <= len(grader._pool.pids()) <= 2
