import asyncio

import pytest

from miles.core.samples import Sample
from miles.rollout.rm_hub.gpqa import GpqaGrader
from miles.rollout.rm_hub.graders import LabelError

CITIES = ["Paris", "Rome", "the city of Oslo", "Old Rome"]


def grade(response, label=None, **metadata):
    return asyncio.run(GpqaGrader().grade_sample(response, Sample(response=response, label=label, metadata=metadata)))


def test_the_letter_is_compared_with_the_label():
    # Case A25.
    assert grade("Having weighed all of them, the answer is C.", "C") == 1
    assert grade("Both readings fit the third option.\n\nC", "C") == 1
    assert grade("Having weighed all of them, the answer is C.", "A") == 0


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("C", {}),
        ("c", {}),
        ("(C)", {}),
        (2, {}),
        (2, {"choices": CITIES}),
        ("City of Oslo.", {"choices": CITIES}),
        (None, {"correct_letter": "C"}),
        ("A", {"correct_letter": "c"}),
        ("C", {"choices": {"A": "Paris", "B": "Rome", "C": "Oslo"}}),
        ("C", {"valid_letters": ["A", "C"]}),
        ("C", {"valid_letters": "abc"}),
    ],
)
def test_the_correct_letter_comes_from_label_or_metadata(label, metadata):
    assert grade("The answer is C", label, **metadata) == 1
    assert grade("The answer is A", label, **metadata) == 0


def test_numbers_of_choices_count_from_zero_and_texts_of_choices_are_no_numbers():
    years = {"choices": ["3", "2", "1", "0"]}
    assert grade("The answer is D", 3, **years) == 1
    assert grade("The answer is A", "3", **years) == 1


def test_letters_are_as_many_as_choices():
    assert grade("The answer is E", "A", choices=CITIES) == 0
    with pytest.raises(LabelError, match="'E' is neither one of the letters A, B, C, D"):
        grade("The answer is E", "E", choices=CITIES)


def test_without_a_letter_the_final_statement_may_have_the_text():
    assert grade("The answer is Rome.", "B", choices=CITIES) == 1
    assert grade("So it is clear:\nRome", "B", choices=CITIES) == 1
    assert grade("The answer is not Rome.", "B", choices=CITIES) == 0
    assert grade("The answer isn't Rome.", "B", choices=CITIES) == 0
    assert grade("The answer is Old Rome.", "D", choices=CITIES) == 1
    assert grade("Paris or Rome", "B", choices=CITIES) == 0
    assert grade("Rome is far. The answer is Paris.", "B", choices=CITIES) == 0
    assert grade("Error: Rome is not reachable", "B", choices=CITIES) == 0
    assert grade("I cannot tell whether it is Rome", "B", choices=CITIES) == 0
    assert grade("the answer: 42 m", "42 m") == 1
    assert grade("The answer is X", "A", answer_text="X", valid_letters="AB") == 1


def test_an_empty_target_is_in_nothing():
    # Case A31.
    assert grade("I choose C", "A") == 0
    assert grade("A", "A") == 1
    assert grade("...", "!!!") == 0
    assert grade("anything", "B", choices=["x", "..."]) == 0
    assert grade("anything", "B", choices=["x", ""]) == 0


def test_thoughts_are_no_answers():
    assert grade("<think>the answer is B</think>The answer is C", "C") == 1
    assert grade("<think>the answer is C</think>I give up", "C") == 0
    assert grade("<think>the answer is C", "C") == 0


@pytest.mark.parametrize(
    ("label", "metadata", "problem"),
    [
        (None, {}, "the label None is neither"),
        ("", {}, "the label '' is neither"),
        (["C"], {}, "is neither"),
        (9, {}, "the label 9 is neither"),
        (True, {}, "the label True is neither"),
        ("Berlin", {"choices": CITIES}, "the label 'Berlin' is neither"),
        ("A", {"correct_letter": "Z"}, "correct_letter is 'Z', and the letters are A, B"),
        ("A", {"valid_letters": "AA"}, "valid_letters is 'AA'"),
        ("A", {"valid_letters": 4}, "valid_letters is 4"),
    ],
)
def test_a_row_without_a_correct_choice_is_an_error(label, metadata, problem):
    with pytest.raises(LabelError, match=problem):
        grade("The answer is A", label, **metadata)
