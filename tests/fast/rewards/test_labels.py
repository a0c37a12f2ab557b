"""Rows that a built-in reward cannot grade against are found when data is loaded."""

from types import SimpleNamespace

import pytest

from miles.rollout.rm_hub.labels import label_check, label_problem


@pytest.mark.parametrize(
    ("rm_type", "label", "metadata", "problem"),
    [
        ("exact", None, {}, "the row has no label"),
        ("exact", float("nan"), {}, "the label is NaN"),
        ("f1", ["a", float("nan")], {}, "the label is NaN"),
        ("math", r"\boxed{}", {}, "the label is an empty box"),
        ("boxed_math", "<unparsable gold>", {}, "cannot be read as mathematics"),
        ("dapo", "x+1", {}, "is not a number"),
        ("code", "hello", {}, "the test 'hello' has no assert statement"),
        ("code", "print(1)", {}, "has no assert statement"),
        ("code", None, {}, "it has no tests"),
        ("gpqa", "Z", {"choices": ["a", "b"]}, "is neither one of the letters A, B"),
    ],
)
def test_what_cannot_be_graded_against_is_said(rm_type, label, metadata, problem):
    assert problem in str(label_problem(rm_type, label, metadata))


@pytest.mark.parametrize(
    ("rm_type", "label", "metadata"),
    [
        ("exact", 4, {}),
        ("code", ["def f(): return 1", "assert f() == 1"], {}),
        ("code", "for x in (1, 2):\n    assert x", {}),
        ("code", None, {"inputs": ["1"], "outputs": ["1"]}),
        ("gpqa", None, {"correct_letter": "C"}),
        ("random", None, {}),
        ("remote_rm", None, {}),
    ],
)
def test_what_can_be_graded_against_is_not(rm_type, label, metadata):
    assert label_problem(rm_type, label, metadata) is None


def test_a_row_that_names_an_unknown_reward_is_found_with_the_nearest_name():
    check = label_check(SimpleNamespace(custom_rm_path=None, rm_type="exact"))
    assert "no built-in reward 'maht': did you mean math?" in str(check("4", {"rm_type": "maht"}))
    assert "no built-in reward 7" in str(check("4", {"rm_type": 7}))
    assert check("4", {"rm_type": "math"}) is None
    assert label_check(SimpleNamespace(custom_rm_path="my.reward", rm_type=None)) is None
