import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.rm_hub.code_program import plain
from miles.rollout.rm_hub.code_tests import _value, extract_code, passes, read_tests, same_text, same_value
from miles.rollout.rm_hub.graders import LabelError


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\noutput:\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```json\n{}\n```\nno code", "```json\n{}\n```\nno code"),
        ("```Python3 title='a'\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("~~~python\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''\n"),
        ("````python\n```\n````", "```\n"),
        ("x = 1", "x = 1"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("", ""),
    ],
)
def test_the_last_closed_python_block_is_the_program(response, code):
    assert extract_code(response) == code


@given(st.text(alphabet="`~ \npython", max_size=200))
def test_extraction_gives_a_part_of_any_response(response):
    assert extract_code(response) in response


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \n2", "1\r\n2  \n\n", True),
        ("1\n2", "2\n1", False),
        ("", "\n", True),
        ("", "x", False),
        ("0.5", "0.50", True),
        ("1e-9", "0", False),
        ("9007199254740993", "9007199254740992", False),
        ("1", "1.0", True),
        ("a b", "a  b", True),
        (" a", "a", True),
        ("YES", "Yes", False),
        ("nan", "NaN", False),
        ("1e999999", "1", False),
        ("1\n", "1\n2", False),
    ],
)
def test_texts_are_the_same_but_for_blanks_and_spellings_of_numbers(expected, found, same):
    assert same_text(expected, found) is same


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 3], False),
        ({"1": "a"}, {1: "a"}, True),
        (1, True, False),
        (0.3, 0.1 + 0.2, True),
        (1, 1.0, True),
        (0.0, 1e-300, False),
        ("1", 1, False),
        (None, None, True),
        (2**70, 2**70, True),
        (1.0, 10**400, False),
        ([5], 5, False),
    ],
)
def test_values_are_the_same_as_those_of_a_json_file(expected, found, same):
    result = {"end": "exit", "code": 0, "stderr": ""}
    test = read_tests({"fn_name": "f", "inputs": [[]], "outputs": [expected]}, {})[0]
    assert passes(test, {**result, "report": json.dumps({"parts": [plain(found)]})}) is same
    if expected != 1.0:
        assert same_value(expected, found) is same


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_plain_data_comes_back_as_it_was(value):
    back = _value(json.loads(json.dumps(plain(value))))
    assert back == value
    assert type(back) is type(value)


def test_what_is_no_data_does_not_travel():
    class Mine:
        pass

    with pytest.raises(ValueError, match="no plain data"):
        plain(Mine())
    assert plain({1, 2}) == {"set": [1, 2]}


def asks(label, **metadata):
    return [(test.stdin, test.ask) for test in read_tests(label, metadata)]


def test_rows_may_hold_their_tests_in_several_forms():
    assert asks({"inputs": ["1"], "outputs": ["2"]}) == [("1", None)]
    assert asks('{"inputs": [["1", "2"]], "outputs": ["2"]}') == [("1\n2", None)]
    assert asks(None, inputs=["1"], outputs=["2"]) == [("1", None)]
    assert asks([{"input": "1", "output": "2"}]) == [("1", None)]
    assert asks({"fn_name": "f", "inputs": ["[1]\n2"], "outputs": ["3"]}) == [
        ("", {"function": "f", "args": [[1], 2]})
    ]
    assert asks({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}) == [("", {"function": "f", "args": [1, 2]})]
    assert asks(None, test_list=["assert f(1) == 2"]) == asks(["assert f(1) == 2"]) == asks("assert f(1) == 2")


def test_operands_of_asserts_are_asked_for_and_known_ones_stay_here():
    texts = [
        "import math",
        "assert f(1) == (2, 'x')",
        "assert not f(2)\nassert f(3)",
        "assert 5 in f(4)",
        "for i in []:\n    assert f(i)",
    ]
    tests = read_tests(texts, {})
    assert [test.ask.get("parts") for test in tests] == [["f(1)"], ["f(2)"], ["f(3)"], ["f(4)"], None]
    assert all(test.ask["setup"] == "import math" for test in tests)
    assert all("'x'" not in str(test.ask) for test in tests)


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (None, "it has no tests"),
        ("", "it has no tests"),
        (5, "it has no tests"),
        ([], "it has no tests"),
        ({"inputs": [], "outputs": []}, "lists with at least one test"),
        ({"inputs": ["1"]}, "lists with at least one test"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "is a int, and text is wanted"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "a list of arguments is wanted"),
        ({"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}, "is no JSON"),
        (["assert f("], "is no Python"),
        (["import math"], "no assert statement"),
        (["assert 1", 2], "something else than assert statements"),
    ],
)
def test_tests_that_cannot_be_read_are_named(label, problem):
    with pytest.raises(LabelError, match=problem):
        read_tests(label, {})


LABELS = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["inputs", "outputs", "fn_name", "tests"]), x),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(LABELS)
def test_any_label_gives_tests_or_a_label_error(label):
    found = []
    with contextlib.suppress(LabelError):
        found = read_tests(label, {})
    assert all(callable(test.is_right) for test in found)
