r"""Reads an answer as a value: which of number, list, tuple, interval, set, matrix, relation or words the text writes."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from miles.rollout.rm_hub.math_lexer import NotRead, Token, Unknown, prepared, thousands_removed, tokens_of
from miles.rollout.rm_hub.math_parser import parse_scalar
from miles.rollout.rm_hub.math_reals import real_line, set_of_reals, without_points
from miles.rollout.rm_hub.math_relations import inequality_pieces, relation
from miles.rollout.rm_hub.math_scalars import Expression, expressions_equal, roughly_equal
from miles.rollout.rm_hub.math_structure import at_top, depths, joined, split_at
from miles.rollout.rm_hub.math_unit_reader import without_unit
from miles.rollout.rm_hub.math_values import (
    Choice,
    Items,
    Matrix,
    Named,
    Piece,
    Pieces,
    Ratio,
    Relation,
    Scalar,
    Value,
    Words,
)

_MAX_SIGNS = 4
_CLOSING = {"(": ")", "[": "]", "S{": "S}", "⟨": "⟩"}
_KINDS: dict[str, Any] = {"(": "()", "[": "[]", "S{": "{}", "⟨": "⟨⟩"}
_RELATIONS = frozenset("=<>≤≥≠")
_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|textrm|mathrm|mathbf)\{)?\s*\(?(?P<letter>[A-J])(?:\)\s*\}?|[.:](?=\s)\s*\}?)(?P<rest>.*)",
    re.DOTALL,
)
_OPERATOR_AHEAD = re.compile(r"\s*(?:[-+*/^_=<>(!,]|\\(?:cdot|times|cup|cap|in|le|ge|frac\b.*[A-J])(?![A-Za-z]))")
_NOTHING = frozenset(
    [
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "empty set",
        "the empty set",
        "none exist",
    ]
)
_EVERYTHING = frozenset(["all real numbers", "all reals", "the real numbers", "real numbers", "all real values"])
_MATRICES = frozenset(["matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"])


def read(text: str) -> list[Value]:
    """The readings of a text, usually one. Raises NotRead, or Unknown where a larger reader may do better."""
    return list(_read(text))


@functools.lru_cache(maxsize=2048)
def _read(text: str) -> tuple[Value, ...]:
    text = prepared(text)
    if (choice := _CHOICE.fullmatch(text)) and not _OPERATOR_AHEAD.match(choice["rest"]):
        rest = choice["rest"].strip(" ~\\,;:")
        if rest:
            return (Choice(choice["letter"], _content(rest)),)
        return (Choice(choice["letter"], None),)
    if "≈" in text or r"\approx" in text:
        return _approximated(text)
    ungrouped = thousands_removed(text)
    if ungrouped == text or any(opening in text for opening in ("(", "[", r"\{")):
        if ungrouped != text and ", " in text:
            text = ungrouped
        return (_value(tokens_of(text)),)
    return (_value(tokens_of(ungrouped)), *_ungrouped(text))


def _approximated(text: str) -> tuple[Value, ...]:
    """The exact value and the decimal of `\\frac{\\pi}{3} \\approx 1.047`; of `x \\approx 1.047` only the decimal."""
    parts = [part.strip() for part in text.replace(r"\approx", "≈").split("≈")]
    if len(parts) != 2 or not all(parts):
        raise NotRead("it is a chain of approximations")
    left, right = (_read(part)[0] for part in parts)
    inner = left.value if isinstance(left, Named) else left
    if not isinstance(right, Scalar):
        raise NotRead("it approximates more than a number")
    if isinstance(left, Scalar) and left.expression.node[0] == "sym":
        return (Named(left.expression.node[1], right),)
    if not isinstance(inner, Scalar) or not roughly_equal(inner.expression, right.expression):
        raise NotRead("its sides are far from each other")
    return (left, right)


def _content(text: str) -> Value | None:
    try:
        return _read(text)[0]
    except NotRead:
        return None


def _ungrouped(text: str) -> list[Value]:
    """`100,200,300` may be a list too; `1,000` may not."""
    groups = text.split(",")
    if len(groups) < 3 or any(group.startswith("0") for group in groups[1:]):
        return []
    return [_value(tokens_of(text))]


def _value(tokens: Sequence[Token]) -> Value:
    tokens = joined(tokens)
    if not tokens:
        raise NotRead("there is nothing")
    if (words := _words(tokens)) is not None:
        return words
    parts, signs = split_at(tokens, lambda token: token.kind == "sep")
    if len(parts) > 1:
        return _listed(parts, signs)
    if any(token.text in ("∪", "∖") for token in at_top(tokens)):
        return _union(tokens)
    if any(token.kind == "op" and token.text == "∈" for token in at_top(tokens)):
        parts, _ = split_at(tokens, lambda token: token.text == "∈")
        if len(parts) != 2 or len(parts[0]) != 1:
            raise Unknown("it has a membership")
        return set_of_reals(_value(parts[1]))
    if any(token.kind == "op" and token.text in _RELATIONS for token in at_top(tokens)):
        return _related(tokens)
    if (inside := _inside(tokens)) is not None:
        return _bracketed(tokens[0].text, tokens[-1].text, inside)
    if tokens[0].kind == "command" and tokens[0].text.startswith("begin "):
        return _matrix(tokens)
    if len(tokens) == 1 and tokens[0].text == "mathbb R":
        return Pieces((real_line(),))
    if len(tokens) == 1 and tokens[0].text == "∅":
        return Pieces(())
    parts, _ = split_at(tokens, lambda token: token.kind == "op" and token.text == ":")
    if len(parts) > 1:
        is_time = (
            len(parts) <= 3 and all(len(p) == 1 and p[0].text.isdigit() for p in parts) and len(parts[-1][0].text) == 2
        )
        return Ratio(tuple(_expression(part) for part in parts), is_time)
    return _scalar(tokens)


def _words(tokens: Sequence[Token]) -> Value | None:
    """Prose, when nothing but words and letters is there and at least one word."""
    if not any(token.kind == "word" for token in tokens):
        return None
    if all(token.kind in ("word", "name", "unit", "function") or token.text in ("-", "'", "!") for token in tokens):
        text = " ".join(token.text for token in tokens).casefold()
        if text in _NOTHING:
            return Pieces(())
        return Pieces((real_line(),)) if text in _EVERYTHING else Words(text)
    return None


def _listed(parts: list[list[Token]], signs: list[str]) -> Value:
    first = _value(parts[0])
    if isinstance(first, Named) and not any(t.text in _RELATIONS for part in parts[1:] for t in at_top(part)):
        return Named(first.name, Items("list", (first.value, *(_value(part) for part in parts[1:]))))
    values: tuple[Value, ...] = (first, *(_value(part) for part in parts[1:]))
    if all(isinstance(value, Pieces) for value in values) and (
        set(signs) == {"or"} or (len(values) > 1 and "and" not in signs)
    ):
        return Pieces(tuple(piece for value in values if isinstance(value, Pieces) for piece in value.pieces))
    if any(isinstance(value, Pieces) for value in values):
        raise Unknown("it joins inequalities")
    values = _flat(values)
    names = {value.name for value in values if isinstance(value, Named)}
    if len(names) == 1 and all(isinstance(value, Named) for value in values):
        return Named(names.pop(), Items("list", tuple(value.value for value in values if isinstance(value, Named))))
    return Items("list", values)


def _flat(values: Iterable[Value]) -> tuple[Value, ...]:
    """Values with those of inner lists, such as `\\pm 2`, in their places."""
    inner = (value.items if isinstance(value, Items) and value.kind == "list" else (value,) for value in values)
    return tuple(itertools.chain.from_iterable(inner))


def _union(tokens: Sequence[Token]) -> Value:
    parts, signs = split_at(tokens, lambda token: token.kind == "op" and token.text in ("∪", "∖", "∈"))
    if "∈" in signs:
        if signs[0] != "∈" or "∈" in signs[1:] or len(parts[0]) != 1:
            raise Unknown("it has a membership")
        parts, signs = parts[1:], signs[1:]
    sets = [set_of_reals(_value(part)) for part in parts]
    if signs == ["∖"]:
        return without_points(sets[0], sets[1])
    if "∖" in signs:
        raise Unknown("it has a difference of sets")
    return Pieces(tuple(piece for pieces in sets for piece in pieces.pieces))


def _inside(tokens: Sequence[Token]) -> list[Token] | None:
    """What one pair of brackets around everything holds; None without one. The brackets may be of two kinds."""
    if tokens[0].kind != "open" or tokens[-1].kind != "close" or 0 in depths(tokens)[1:-1]:
        return None
    pair = (tokens[0].text, tokens[-1].text)
    if pair[0] in "⌊⌈":
        return None
    if _CLOSING.get(pair[0]) != pair[1] and not (pair[0] in "([" and pair[1] in ")]"):
        raise NotRead("its brackets do not match")
    return list(tokens[1:-1])


def _bracketed(opening: str, closing: str, inside: list[Token]) -> Value:
    if opening == "S{":
        return _set(inside)
    parts, signs = split_at(inside, lambda token: token.kind == "sep")
    if any(sign not in ",;" for sign in signs):
        raise NotRead("words stand in brackets")
    if _CLOSING[opening] != closing or (len(parts) == 2 and any(_is_infinite(part) for part in parts)):
        if len(parts) != 2:
            raise NotRead("an interval has two ends")
        low, high = (_expression(part) for part in parts)
        return Pieces((Piece(low, opening == "[", high, closing == "]"),))
    if len(parts) == 1:
        return _value(parts[0])
    return Items(_KINDS[opening], tuple(_value(part) for part in parts))


def _is_infinite(part: list[Token]) -> bool:
    return bool(part) and part[-1].text == "oo" and len(part) <= 2


def _set(inside: list[Token]) -> Value:
    if not inside:
        return Pieces(())
    found = depths(inside)
    bars = [i for i, t in enumerate(inside) if found[i] == 0 and t.kind == "op" and t.text in ("|", ":")]
    if bars and (bars[0] == 1 or (bars[0] == 3 and inside[2].text == "mathbb R")):
        return set_of_reals(_value(inside[bars[0] + 1 :]))
    parts, signs = split_at(inside, lambda token: token.kind == "sep")
    if any(sign not in ",;" for sign in signs):
        raise NotRead("words stand in a set")
    return Items("{}", _flat([_value(part) for part in parts]))


def _matrix(tokens: Sequence[Token]) -> Matrix:
    name = tokens[0].text.removeprefix("begin ")
    if name not in _MATRICES or tokens[-1].text != f"end {name}":
        raise Unknown(f"{name} is not read")
    inside = list(tokens[1:-1])
    if name == "array" and inside and inside[0].kind == "{":
        inside = inside[next(i for i, t in enumerate(inside) if t.kind == "}") + 1 :]
    if inside and inside[-1].text == r"\\":
        inside.pop()
    rows, _ = split_at(inside, lambda token: token.text == r"\\")
    cells = [split_at(row, lambda token: token.text == "&")[0] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise NotRead("the rows of the matrix differ in length")
    return Matrix(tuple(tuple(_expression(cell) for cell in row) for row in cells))


def _related(tokens: Sequence[Token]) -> Value:
    parts, signs = split_at(tokens, lambda token: token.kind == "op" and token.text in _RELATIONS)
    if set(signs) == {"="}:
        return _equation(parts)
    if "=" in signs:
        raise NotRead("it mixes equations and inequalities")
    sides = [_expression(part) for part in parts]
    solved = inequality_pieces(sides, signs)
    if solved is not None:
        return solved
    if len(sides) != 2:
        raise Unknown("it is a chain of inequalities")
    return relation(signs[0], *sides)


def _equation(parts: list[list[Token]]) -> Value:
    name = _name_of(parts[0])
    if name is not None:
        value = _value(parts[-1])
        if isinstance(value, Scalar) and name in value.expression.symbols:
            if len(parts) != 2:
                raise NotRead("it is a chain of equations")
            return Relation("=", _expression(parts[0]), value.expression)
        for part in parts[1:-1]:
            _check_same(_value(part), value)
        return Named(name, value)
    if len(parts) == 2:
        left, right = (_expression_with_unit(part) for part in parts)
        if not (left.expression.symbols or right.expression.symbols):
            _check_same(left, right)
            return right
        if right.expression.symbols and not left.expression.symbols:
            left, right = right, left
        if right.unit is None and left.unit is None:
            return Relation("=", left.expression, right.expression)
        if _combines(left.expression) and not right.expression.symbols:
            return right
        raise NotRead("it is an equation with a unit")
    values = [_expression_with_unit(part) for part in parts]
    start = 1 if values[0].expression.symbols else 0
    for value in values[start:-1]:
        _check_same(value, values[-1])
    return Relation("=", values[0].expression, values[-1].expression) if start else values[-1]


def _combines(left: Expression) -> bool:
    """Whether a left side asks for the value of a combination, as `m + n` does, rather than being an unsolved equation."""
    return len(left.symbols) > 1 or (left.node[0] == "fn" and left.node[1] != "abs")


def stated_value(value: Relation) -> Expression | None:
    """The 13 of `m + n = 13`; None for an equation that still is to be solved."""
    if value.sign == "=" and _combines(value.left) and not value.right.symbols:
        return value.right
    return None


def _check_same(a: Value, b: Value) -> None:
    """Raises NotRead when a chain of equations contradicts itself."""
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        if a.unit is None and b.unit is None and expressions_equal(a.expression, b.expression):
            return
        if a.unit is not None or b.unit is not None:
            return
    raise NotRead("its sides are not equal")


def _name_of(tokens: Sequence[Token]) -> str | None:
    """The name that a left side gives: a symbol, words, or a function of symbols such as `f(x)`."""
    if len(tokens) == 1 and tokens[0].kind == "name":
        return tokens[0].text
    if tokens and all(token.kind in ("word", "unit") for token in tokens):
        return " ".join(token.text for token in tokens).casefold()
    start = 1 if tokens and tokens[0].kind == "name" else 0
    has_list = len(tokens) >= start + 3 and tokens[start].text == "(" and tokens[-1].text == ")"
    inside = tokens[start + 1 : -1]
    is_point = start == 0 and any(token.kind == "sep" for token in inside)
    if has_list and (start or is_point) and all(t.kind in ("name", "sep", "number") for t in inside):
        return "".join(token.text for token in tokens)
    return None


def _expression(tokens: Sequence[Token]) -> Expression:
    value = _expression_with_unit(tokens)
    if value.unit is not None:
        raise NotRead("a unit stands there")
    return value.expression


def _expression_with_unit(tokens: Sequence[Token]) -> Scalar:
    value = _scalar(tokens)
    if not isinstance(value, Scalar):
        raise NotRead("one value is wanted there")
    return value


def _scalar(tokens: Sequence[Token]) -> Value:
    tokens, unit = without_unit(list(tokens))
    count = sum(token.text in ("±", "∓") for token in tokens)
    if count == 0:
        return Scalar(_parsed(tokens), unit)
    if count > _MAX_SIGNS:
        raise NotRead("it has too many signs")
    linked = any(token.text == "∓" for token in tokens)
    choices = ["+" * count, "-" * count] if linked else ["".join(c) for c in itertools.product("+-", repeat=count)]
    return Items("list", tuple(Scalar(_parsed(_with_signs(tokens, choice)), unit) for choice in choices))


def _with_signs(tokens: list[Token], signs: str) -> list[Token]:
    found, used = [], 0
    for token in tokens:
        if token.text in ("±", "∓"):
            sign = signs[used] if token.text == "±" else "+-"[signs[used] == "+"]
            found.append(replace(token, text=sign))
            used += 1
        else:
            found.append(token)
    return found


def _parsed(tokens: list[Token]) -> Expression:
    is_decimal = any(token.kind == "number" and ("." in token.text or "e" in token.text.lower()) for token in tokens)
    return Expression.of(parse_scalar(tokens), is_decimal=is_decimal)
