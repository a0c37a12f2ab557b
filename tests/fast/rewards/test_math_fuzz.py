import asyncio
import re
import time
from fractions import Fraction

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.rollout.rm_hub.labels import label_problem
from miles.rollout.rm_hub.math_answer import candidates
from miles.rollout.rm_hub.math_judge import answer_of, judge
from miles.rollout.rm_hub.math_rewards import DapoGrader, MathGrader

PIECES = st.sampled_from(
    [
        "\\frac", "\\frac{1}{2}", "\\sqrt", "\\sqrt[3]", "{", "}", "(", ")", "[", "]", "\\{", "\\}", "|", "^", "_", "!", "+", "-",
        "*", "/", "=", "<", "\\le", ",", ";", ":", "\\pm", "\\mp", "\\cup", "\\setminus", "\\in", "\\infty", "\\mathbb{R}", "\\emptyset",
        "x", "y", "e", "i", "\\pi", "\\sin", "\\log_", "\\ln", "0", "1", "2", "9", "99999", "0.5", "1e300", "1,000", ".", "%", "\\%", "$",
        "^\\circ", "\\text{ cm}", "\\text{and}", "\\text{", "cm", "apples", "or", " ", "\\\\", "&", "\\begin{pmatrix}", "\\end{pmatrix}",
        "\\boxed{", "answer is ", "Answer: ", "####", "</think>", "<think>", "**", "(C)", "\u221a", "\u00b2", "\ud800", "\x00", "\u0663",
        "\\left", "\\right.", "\\binom", "\\binom{9}{4}", "\\lfloor", "\\rceil", "'", "\\overline{3}", "\\operatorname", "^{-1}", "10^{10}",
    ]
)  # fmt: skip
SOUP = st.lists(PIECES, max_size=40).map("".join)
TEXTS = st.one_of(SOUP, st.text(max_size=200))


@given(answer=TEXTS, gold=TEXTS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_no_text_makes_the_judge_raise_or_take_long(answer, gold):
    start = time.process_time()
    assert judge(answer, gold) in (True, False, None)
    assert time.process_time() - start < 1.0


@given(text=TEXTS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_text_makes_extraction_raise(text):
    assert all(isinstance(candidate, str) for candidate in candidates(text))
    assert answer_of(text) is None or isinstance(answer_of(text), str)


@given(text=SOUP)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_text_that_is_read_equals_itself_and_not_nothing(text):
    if text.strip(" $.\\"):
        assert judge(text, text) is not False or re.fullmatch(r"[\s$.~\\,;:!]*", text)
    assert judge(text, "") is False


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(2.0, 1)
    yield grader
    grader.close()


@given(response=SOUP)
@settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_response_makes_a_grader_raise_or_run_past_its_limit(grader, response):
    start = time.monotonic()
    assert asyncio.run(grader.grade(rf"{response} \boxed{{{response}}}", "7")) in (0, 1)
    assert asyncio.run(DapoGrader().grade(f"Answer: {response}", "7"))["score"] in (-1, 1)
    assert time.monotonic() - start < 30  # two seconds of a worker, and its start on a busy machine


def test_a_grader_that_is_closed_leaves_no_process(grader):
    assert asyncio.run(grader.grade(r"\boxed{\max(3, 6)}", "6")) == 1
    pids = grader._pool.pids()
    assert pids
    grader.close()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@given(label=st.one_of(TEXTS, st.integers(), st.floats(), st.none(), st.lists(st.integers())))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_label_makes_the_check_of_labels_raise(label):
    for name in ("dapo", "exact", "boxed_dapo"):
        assert label_problem(name, label) is None or isinstance(label_problem(name, label), str)


NUMBERS = st.fractions(min_value=-50, max_value=50, max_denominator=12)


def written(value: Fraction, how: int) -> str:
    top, bottom = value.numerator, value.denominator
    sign = "-" if top < 0 else ""
    if bottom == 1:
        return [f"{top}", f"{top}.0", rf"\frac{{{2 * top}}}{{2}}", f"({top})"][how % 4]
    forms = [rf"\frac{{{top}}}{{{bottom}}}", f"({top}/{bottom})", rf"{sign}\frac{{{3 * abs(top)}}}{{{3 * bottom}}}"]
    return forms[how % 3]


@st.composite
def expressions(draw, depth=3):
    """(LaTeX, its value worked out here)."""
    if depth == 0 or draw(st.booleans()):
        value = draw(NUMBERS)
        return written(value, draw(st.integers(0, 11))), value
    (a, x), (b, y) = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    how = draw(st.sampled_from("+-*/^"))
    if how == "+":
        return rf"\left({a} + {b}\right)", x + y
    if how == "-":
        return rf"({a} - ({b}))", x - y
    if how == "*":
        return rf"({a}) \cdot ({b})", x * y
    if how == "/" and y:
        return rf"\frac{{{a}}}{{{b}}}", x / y
    n = draw(st.integers(0, 3))
    return (rf"\left({a}\right)^{{{n}}}", x**n) if x or n else (a, x)


def settled(answer, gold):
    """The verdict without the limit that a busy machine may reach."""
    return judge(answer, gold, limit_s=None)


@given(
    pair=expressions(),
    nudge=st.sampled_from([Fraction(1), Fraction(-1), Fraction(1, 97), Fraction(1, 10**9)]),
    how=st.integers(0, 11),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_rational_expressions_are_judged_as_fractions_are(pair, nudge, how):
    text, value = pair
    assert settled(text, rf"\frac{{{value.numerator}}}{{{value.denominator}}}") is True
    assert settled(rf"\frac{{{value.numerator}}}{{{value.denominator}}}", text) is True
    wrong = value + nudge
    assert settled(text, rf"\frac{{{wrong.numerator}}}{{{wrong.denominator}}}") is False
    if value:
        assert settled(text, written(-value, how).replace(".0", "")) is False


@given(
    roots=st.lists(st.integers(-9, 9), min_size=1, max_size=4),
    factor=st.integers(1, 9),
    wrong=st.integers(0, 4),
    by=st.integers(1, 5),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_polynomials_are_judged_by_their_coefficients(roots, factor, wrong, by):
    coefficients = [factor]
    for root in roots:
        shifted = [*coefficients, 0]
        coefficients = [c - root * (coefficients[i - 1] if i else 0) for i, c in enumerate(shifted)]

    def expanded(values):
        degree = len(values) - 1
        return "+".join(f"({c})x^{{{degree - i}}}" for i, c in enumerate(values))

    factored = f"{factor}" + "".join(f"(x-({root}))" for root in roots)
    assert settled(factored, expanded(coefficients)) is True
    coefficients[wrong % len(coefficients)] += by
    assert settled(factored, expanded(coefficients)) is False
