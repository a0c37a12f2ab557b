import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.core.samples import Sample
from miles.rollout.rm_hub.f1 import F1Grader
from miles.rollout.rm_hub.gpqa import GpqaGrader
from miles.rollout.rm_hub.graders import ExactGrader, LabelError
from miles.rollout.rm_hub.judge import judge_score
from miles.rollout.rm_hub.random_rewards import DeterministicRandom
from miles.rollout.rm_hub.think_format import has_think_answer_form

PIECES = [
    "the answer is ", "Answer: ", "not ", "A", "B", "C", "(", ")", "[", "]", "{", "}", r"\boxed{", r"\text{", "**", "$",
    "\n", " ", ",", ".", "or ", "and ", "isn't ", "<think>", "</think>", "<answer>", "</answer>", "Error: ", "I cannot ",
    "Reward: ", "1e", "-", "9", "\ud800", "İ", "ß", "\x00", "\u2028", "é", "𝔸", "option ", "is correct", "a", "the ",
]  # fmt: skip
texts = st.one_of(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.text(max_size=200))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
fuzz = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def graded(call):
    """The reward, or None where the label is refused."""
    try:
        return asyncio.run(call)
    except LabelError:
        return None


@fuzz
@given(texts, anything)
def test_no_text_and_no_label_make_a_grader_raise(text, label):
    for grader in (ExactGrader(), F1Grader()):
        reward = graded(grader.grade(text, label))
        assert reward is None or 0 <= reward <= 1
    sample = Sample(response=text, label=label)
    assert graded(GpqaGrader().grade_sample(text, sample)) in (None, 0.0, 1.0)
    assert graded(DeterministicRandom().grade_sample(text, sample)) in (0.0, 1.0)
    assert has_think_answer_form(text) in (True, False)
    score = judge_score(text)
    assert score is None or abs(score) < float("inf")


@fuzz
@given(
    texts,
    anything,
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("choices", "correct_letter", "valid_letters", "answer_text"), anything)
    ),
)
def test_no_metadata_makes_the_choice_grader_raise(text, label, metadata):
    sample = Sample(response=text, label=label, metadata=metadata)
    assert graded(GpqaGrader().grade_sample(text, sample)) in (None, 0.0, 1.0)


@settings(fuzz, max_examples=200)
@given(st.text(max_size=60).filter(lambda text: not any(letter in text.upper() for letter in "ABCD")))
def test_text_without_a_letter_settles_on_none(text):
    assert asyncio.run(GpqaGrader().grade_sample(text, Sample(label="A"))) == 0


@pytest.mark.parametrize("piece", PIECES)
def test_time_is_bounded_for_a_hundred_kilobytes_of_one_piece(piece):
    text = (piece * (100_000 // len(piece) + 1))[:100_000]
    sample = Sample(response=text, label="A", metadata={"choices": ["x", "y"]})
    began = time.process_time()
    asyncio.run(GpqaGrader().grade_sample(text, sample))
    asyncio.run(F1Grader().grade(text, "the gold"))
    asyncio.run(ExactGrader().grade(text, "the gold"))
    judge_score(text)
    has_think_answer_form(text)
    assert time.process_time() - began < 1


def test_time_grows_no_faster_than_the_text():
    def seconds(size):
        text = ("the answer is A, or B. Reward: 1 " * size)[: 32 * size]
        began = time.process_time()
        for _ in range(3):
            graded(F1Grader().grade(text, "x"))
            judge_score(text)
        return time.process_time() - began

    seconds(1000)
    assert seconds(8000) < 16 * max(seconds(2000), 0.01)
