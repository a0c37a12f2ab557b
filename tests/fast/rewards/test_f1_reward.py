import asyncio

import pytest

from miles.rollout.rm_hub.f1 import F1Grader, f1_score, normalize
from miles.rollout.rm_hub.graders import LabelError


def grade(response, label):
    return asyncio.run(F1Grader().grade(response, label))


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        # Case A30.
        ("A", "A", 1),
        ("B", "A", 0),
        ("An", "An", 1),
        ("The Beatles", "beatles", 1),
        # Case A31.
        ("I choose C", "A", 0),
        ("...", "!!!", 0),
        ("", "", 0),
        ("the cat sat", "a cat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("It’s “Paris”!", "its paris", 1),
        ("yes", "Yes.", 1),
        ("yes it is", "yes", 0),
        ("no", "no way", 0),
        ("noanswer", "the noanswer thing", 0),
    ],
)
def test_words_are_compared_as_squad_does(answer, gold, score):
    assert f1_score(answer, gold) == pytest.approx(score)
    assert f1_score(gold, answer) == pytest.approx(score)


def test_articles_stay_where_nothing_else_is():
    assert normalize("The a AN") == "the a an"
    assert normalize("The  dog,") == "dog"


def test_the_best_of_several_golds_counts():
    assert grade("in New York", ["NYC", "New York"]) == pytest.approx(0.8)


def test_thoughts_are_not_judged():
    assert grade("<think>many words of it</think> Paris", "Paris") == 1
    assert grade("<think>Paris", "Paris") == 0


@pytest.mark.parametrize("label", [None, "", " ", [], ["Paris", ""], {"a": 1}])
def test_a_row_without_gold_is_an_error(label):
    with pytest.raises(LabelError):
        grade("Paris", label)


def test_a_number_is_its_text():
    assert grade("it is 7", 7) == pytest.approx(0.5)
