"""Unit tests of a data row: what a program is asked, and whether what came back is right.

Expected results stay here. A program is told its input and nothing else, and what it sends back is data.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

from miles.rollout.rm_hub.graders import LabelError

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^`\n]*")
_PYTHON = ("python", "py", "python3")
_TRACEBACK = re.compile(r"^\s*Traceback \(most recent call last\):", re.MULTILINE)
_DECIMAL = re.compile(r"[+-]?(\d{1,60}(\.\d{0,60})?|\.\d{1,60})([eE][+-]?\d{1,3})?")
_SETUP = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign
_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_APPLY: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "is": operator.is_,
    "is not": operator.is_not,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "complex": complex,
    "bytes": ast.literal_eval,
    "decimal": Decimal,
    "fraction": Fraction,
}
_RELATIVE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test: what the program is given, and the judge of what came back."""

    stdin: str = ""
    ask: dict[str, Any] | None = None
    """What to evaluate after the program's definitions; None runs it as a script."""
    expected_bytes: int = 0
    is_right: Callable[[dict[str, Any]], bool] = field(repr=False)
    """From the sandbox's result of a program that ended well."""


def passes(test: CodeTest, result: dict[str, Any]) -> bool:
    """Whether a program passed: it ended by itself with status 0 and without a traceback, and then gave the right result."""
    if result["end"] != "exit" or result["code"] != 0 or _TRACEBACK.search(result["stderr"]):
        return False
    try:
        return test.is_right(result)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, ArithmeticError, SyntaxError):
        return False  # what came back is not what the harness sends


def extract_code(response: str) -> str:
    """The last closed Markdown block that is marked as Python; else the last unmarked one; else the whole response."""
    marked = unmarked = None
    opened: tuple[str, str, list[str]] | None = None
    for line in response.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip("\r\n"))
        if opened is None:
            opened = (fence[1], fence[2].lower(), []) if fence else None
        elif fence and not fence[2] and fence[1][0] == opened[0][0] and len(fence[1]) >= len(opened[0]):
            if opened[1] in _PYTHON:
                marked = "".join(opened[2])
            elif not opened[1]:
                unmarked = "".join(opened[2])
            opened = None
        else:
            opened[2].append(line)
    found = unmarked if marked is None else marked
    return response if found is None else found


def read_tests(label: Any, metadata: dict[str, Any]) -> list[CodeTest]:
    """The tests of a row: its label, or where that is empty, the keys of the same names in its metadata.

    Raises LabelError, which says what is wrong with them.
    """
    tests = _parsed(label)
    if tests is None or tests == "":
        tests = metadata
    if isinstance(tests, dict):
        values = cast(dict[str, Any], tests)
        if "inputs" in values or "outputs" in values:
            return _pairs(values.get("inputs"), values.get("outputs"), values.get("fn_name"))
        tests = next((_parsed(values[key]) for key in ("tests", "test_list") if key in values), None)
    if not isinstance(tests, list) or not tests:
        raise LabelError("it has no tests: no inputs and outputs, and no list of assert statements")
    items = cast(list[Any], tests)
    if all(isinstance(item, str) for item in items):
        return _asserts(items)
    if all(isinstance(item, dict) and "input" in item and "output" in item for item in items):
        return _pairs([item["input"] for item in items], [item["output"] for item in items], None)
    raise LabelError("its list of tests holds something else than assert statements or {input, output}")


def _parsed(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value.strip() if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return [value]


def _pairs(inputs: Any, outputs: Any, name: Any) -> list[CodeTest]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise LabelError("inputs and outputs must be lists with at least one test")
    given, expected = cast(list[Any], inputs), cast(list[Any], outputs)
    if len(given) != len(expected):
        raise LabelError(f"there are {len(given)} inputs and {len(expected)} outputs")
    make = _script_test if name in (None, "") else lambda a, b: _call_test(str(name), a, b)
    return [make(a, b) for a, b in zip(given, expected, strict=True)]


def _script_test(stdin: Any, expected: Any) -> CodeTest:
    given, wanted = _text(stdin), _text(expected)
    return CodeTest(
        stdin=given,
        expected_bytes=len(wanted) * 4,
        is_right=lambda result: same_text(wanted, result["stdout"]),
    )


def _text(value: Any) -> str:
    """Text as it is, a list of lines joined."""
    if isinstance(value, list):
        return "\n".join(map(str, cast(list[Any], value)))
    if not isinstance(value, str):
        raise LabelError(f"an input or output of a script is a {type(value).__name__}, and text is wanted")
    return value


def _call_test(name: str, given: Any, expected: Any) -> CodeTest:
    if isinstance(given, str):  # one JSON value a line
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except (ValueError, RecursionError):
            raise LabelError(
                f"an input or output of {name} is no JSON; give a list of arguments, or JSON lines"
            ) from None
    if not isinstance(given, list):
        raise LabelError(f"an input of {name} is a {type(given).__name__}, and a list of arguments is wanted")
    return CodeTest(
        ask={"function": name, "args": given},
        expected_bytes=len(json.dumps(expected)),
        is_right=lambda result: same_value(expected, *_parts(result)),
    )


def _asserts(texts: list[str]) -> list[CodeTest]:
    tests: list[CodeTest] = []
    setup: list[str] = []
    for text in texts:
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise LabelError(f"the test {text!r:.80} is no Python: {error}") from None
        if all(isinstance(statement, _SETUP) for statement in body):
            setup.append(text)
            continue
        if not any(isinstance(part, ast.Assert) for part in ast.walk(ast.Module(body, []))):
            raise LabelError(f"the test {text!r:.80} has no assert statement")
        before = "\n".join(setup)
        if all(isinstance(statement, ast.Assert) for statement in body):
            tests += [_assert_test(before, cast(ast.Assert, statement).test) for statement in body]
        else:
            ask = {"setup": before, "statements": text}
            tests.append(CodeTest(ask=ask, is_right=lambda result: json.loads(result["report"]) == {"held": True}))
    if not tests:
        raise LabelError("its tests hold no assert statement")
    return tests


def _assert_test(setup: str, condition: ast.expr) -> CodeTest:
    """Its operands are evaluated there, where they are not known to be right, and compared here."""
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1:
        sides: list[ast.expr] = [condition.left, condition.comparators[0]]
        comparison = _OPERATORS[type(condition.ops[0])]
    elif isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        sides, comparison = [condition.operand], "not"
    else:
        sides, comparison = [condition], ""
    known = [_literal(side) for side in sides]
    parts = [ast.unparse(side) for side, value in zip(sides, known, strict=True) if value is None]
    if not parts:  # it asks nothing of the program
        parts, known = [ast.unparse(side) for side in sides], [None] * len(sides)
    literals = any(value is not None for value in known)

    def is_right(result: dict[str, Any]) -> bool:
        answer = json.loads(result["report"])
        if "held" in answer:
            return answer["held"] is True
        found = iter(_parts(result))
        values = [next(found) if value is None else value[0] for value in known]
        if len(values) == 1:
            return bool(values[0]) != (comparison == "not")
        return bool(_APPLY[comparison](*values))

    ask = {"setup": setup, "parts": parts, "operator": "" if literals else comparison, "plain_only": literals}
    return CodeTest(ask=ask, expected_bytes=len(ast.unparse(condition)), is_right=is_right)


def _literal(expression: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(expression),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _parts(result: dict[str, Any]) -> list[Any]:
    return [_value(part) for part in json.loads(result["report"])["parts"]]


def _value(data: Any) -> Any:
    """The value that `code_program.plain` wrote."""
    if isinstance(data, list):
        return [_value(item) for item in cast(list[Any], data)]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = cast(dict[str, Any], data).items()
    if tag in _FROM_TEXT:
        return _FROM_TEXT[tag](inner)
    if tag == "dict":
        return {_value(key): _value(item) for key, item in inner}
    items = [_value(item) for item in inner]
    return tuple(items) if tag == "tuple" else set(items)


def same_value(expected: Any, found: Any) -> bool:
    """Whether a returned value is the expected one of a JSON file.

    Tuples are lists, keys of objects are text, floats agree to nine digits, and True is not 1.
    """
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        pairs = zip(cast(list[Any], expected), cast(list[Any], found), strict=False)
        return len(expected) == len(found) and all(same_value(a, b) for a, b in pairs)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(expected, dict) and isinstance(found, dict):
        wanted, got = ({str(k): v for k, v in cast(dict[Any, Any], d).items()} for d in (expected, found))
        return wanted.keys() == got.keys() and all(same_value(wanted[key], got[key]) for key in wanted)
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, float) or isinstance(found, float):
        if not isinstance(expected, int | float) or not isinstance(found, int | float):
            return False
        return expected == found or math.isclose(expected, found, rel_tol=_RELATIVE)
    return type(expected) is type(found) and expected == found


def same_text(expected: str, found: str) -> bool:
    """Whether a program printed what was expected: white space at ends of lines and blank lines at the end aside.

    A number may be written in another way (`0.50` for `0.5`), with the same value exactly.
    """
    wanted, got = _lines(expected), _lines(found)
    if wanted == got:
        return True
    if len(wanted) != len(got):
        return False
    return all(a == b or _same_words(a.split(), b.split()) for a, b in zip(wanted, got, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(wanted: list[str], got: list[str]) -> bool:
    return len(wanted) == len(got) and all(a == b or _same_number(a, b) for a, b in zip(wanted, got, strict=True))


def _same_number(a: str, b: str) -> bool:
    return bool(_DECIMAL.fullmatch(a) and _DECIMAL.fullmatch(b)) and Decimal(a) == Decimal(b)
