import time
from fractions import Fraction

import pytest

from miles.rollout.rm_hub.math_text import (
    bare_expression,
    canonical,
    last_boxed,
    plain_number,
    quick_verdict,
    without_emphasis,
)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{7} and cut off in \boxed{8", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_complete_box_is_found_by_its_braces(text, box):
    assert last_boxed(text) == box


def test_paired_emphasis_is_removed_and_powers_stay():
    assert without_emphasis("so **73** and __x__") == "so 73 and x"
    assert without_emphasis("2**3 + 4") == "2**3 + 4"


def test_a_response_that_repeats_an_open_box_takes_no_time():
    started = time.perf_counter()
    assert last_boxed(r"\boxed{" * 20_000) is None
    assert last_boxed(r"\boxed{7} " + r"\boxed{" * 20_000) == "7"
    assert time.perf_counter() - started < 1


def test_only_a_short_line_without_words_is_a_bare_expression():
    assert bare_expression(" n=2,3,4\n") == "n=2,3,4"
    assert bare_expression(r"\frac{1}{2}") == r"\frac{1}{2}"
    assert bare_expression("it is 4") is None
    assert bare_expression("1\n2") is None
    assert bare_expression(" ") is None


def test_spelling_that_means_nothing_is_removed_before_strings_are_compared():
    assert canonical(r"$\dfrac{1}{2}$.") == canonical(r" \frac{1}{2} ")
    assert canonical(r"\left( 1, 2 \right)") == canonical("(1,2)")
    assert canonical(r"\text{Paris}") == canonical("Paris")
    assert canonical("A") != canonical("a")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-1,000.5", Fraction(-2001, 2)),
        ("1.2e1", 12),
        ("2/3", Fraction(2, 3)),
        ("$.5$", Fraction(1, 2)),
        ("004", 4),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_digits_are_read_exactly(text, value):
    assert plain_number(text).value == value


@pytest.mark.parametrize("text", ["", "x", "1,2", "1/0", "1:00", "nan", "inf", "1e99999999999", "1" * 1001, "٣"])
def test_anything_else_is_not_a_plain_number(text):
    assert plain_number(text) is None


def test_an_empty_answer_equals_nothing():
    assert quick_verdict("", "") is None
    assert quick_verdict("$ $", ".") is None
