"""Whether two values that were read are the same answer. The label comes first: only the answer may say too much."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cmp_to_key

from miles.rollout.rm_hub.math_numbers import Irrational, NoValue, TooLarge, exact, numeric
from miles.rollout.rm_hub.math_parser import Node
from miles.rollout.rm_hub.math_reader import stated_value
from miles.rollout.rm_hub.math_reals import as_pieces
from miles.rollout.rm_hub.math_scalars import Expression, expressions_equal, infinity_sign, proportional
from miles.rollout.rm_hub.math_units import PERCENT
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

_MAX_ITEMS = 40
_DEGREE: Node = ("div", ("const", "pi"), ("num", Fraction(180)))


def values_equal(gold: Value, answer: Value) -> bool:
    """Whether `answer` is the answer that `gold` is."""
    if isinstance(gold, Choice) or isinstance(answer, Choice):
        return _choices_equal(gold, answer)
    if isinstance(gold, Named) or isinstance(answer, Named):
        return _named_equal(gold, answer)
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _scalars_equal(gold, answer)
    if isinstance(gold, Pieces) or isinstance(answer, Pieces):
        first, second = as_pieces(gold), as_pieces(answer)
        return first is not None and second is not None and _sets_equal(first, second)
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _items_equal(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices_equal(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _relations_equal(gold, answer)
    if isinstance(gold, Ratio) or isinstance(answer, Ratio):
        return _ratios_equal(gold, answer)
    if isinstance(gold, Items) or isinstance(answer, Items):
        return _one_item_equal(gold, answer)
    return isinstance(gold, Words) and gold == answer


def _choices_equal(gold: Value, answer: Value) -> bool:
    letters = [_letter(value) for value in (gold, answer)]
    if None not in letters:
        return letters[0] == letters[1]
    contents = [value.content if isinstance(value, Choice) else value for value in (gold, answer)]
    return contents[0] is not None and contents[1] is not None and values_equal(contents[0], contents[1])


def _letter(value: Value) -> str | None:
    if isinstance(value, Choice):
        return value.letter
    if isinstance(value, Scalar) and value.unit is None and value.expression.node[0] == "sym":
        name: str = value.expression.node[1]
        return name if len(name) == 1 and "A" <= name <= "J" else None
    return None


def _named_equal(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Named) and isinstance(answer, Named):
        if gold.name == answer.name:
            return values_equal(gold.value, answer.value)
        first, second = _as_relation(gold), _as_relation(answer)
        return first is not None and second is not None and _relations_equal(first, second)
    for named, other in ((gold, answer), (answer, gold)):
        if isinstance(named, Named) and isinstance(other, Relation):
            return _as_relation(named) is not None and _relations_equal(
                *(_as_relation(v) or v for v in (gold, answer))
            )
    if isinstance(gold, Named):
        return values_equal(gold.value, answer)
    assert isinstance(answer, Named)
    return values_equal(gold, answer.value)


def _as_relation(value: Value) -> Relation | None:
    if isinstance(value, Relation):
        return value
    if (
        isinstance(value, Named)
        and isinstance(value.value, Scalar)
        and value.value.unit is None
        and value.name.isidentifier()
    ):
        return Relation("=", Expression.of(("sym", value.name)), value.value.expression)
    return None


def _scalars_equal(gold: Scalar, answer: Scalar) -> bool:
    a, b = gold.expression, answer.expression
    if gold.unit is None and answer.unit is None:
        return expressions_equal(a, b)
    if gold.unit is not None and answer.unit is not None:
        if gold.unit.powers != answer.unit.powers:
            return False
        return expressions_equal(_scaled(a, gold.unit.size), _scaled(b, answer.unit.size))
    united, unit, plain = (gold.expression, gold.unit, b) if gold.unit is not None else (b, answer.unit, a)
    assert unit is not None
    if unit == PERCENT:
        return _percent_equal(united, plain)
    if unit.is_degree and _is_radians(plain):
        return expressions_equal(_times(united, _DEGREE), plain)
    return expressions_equal(united, plain)


def _percent_equal(percent: Expression, plain: Expression) -> bool:
    """`50%` is 1/2, and 50 where the question asks for percent; a plain number up to 1 is never taken for percent."""
    if expressions_equal(_scaled(percent, PERCENT.size), plain):
        return True
    try:
        if abs(exact(plain.node, {})) <= 1:
            return False
    except (Irrational, NoValue, TooLarge, KeyError):
        return False
    return expressions_equal(percent, plain)


def _is_radians(expression: Expression) -> bool:
    return _has_pi(expression.node)


def _has_pi(node: Node) -> bool:
    return node == ("const", "pi") or any(isinstance(part, tuple) and _has_pi(part) for part in node[1:])


def _scaled(expression: Expression, size: Fraction) -> Expression:
    return expression if size == 1 else _times(expression, ("num", size))


def _times(expression: Expression, factor: Node) -> Expression:
    return Expression.of(("mul", expression.node, factor), is_decimal=expression.is_decimal)


def _items_equal(gold: Items, answer: Items) -> bool:
    if gold.kind in ("list", "{}") and answer.kind in ("list", "{}"):
        if gold.kind == answer.kind == "list":
            return len(gold.items) == len(answer.items) and _covers(gold.items, answer.items, once=True)
        return _covers(gold.items, answer.items) and _covers(answer.items, gold.items)
    if gold.kind == answer.kind and len(gold.items) == len(answer.items):
        return all(values_equal(a, b) for a, b in zip(gold.items, answer.items, strict=True))
    for ordered, named in ((gold, answer), (answer, gold)):
        if ordered.kind == "()" and named.kind == "list" and (values := _coordinates(named)) is not None:
            return len(values) == len(ordered.items) and all(
                values_equal(a, b) for a, b in zip(ordered.items, values, strict=True)
            )
    return False


def _coordinates(items: Items) -> list[Value] | None:
    """The values of `x = 1, y = 2`, whose names stand in alphabetical order."""
    named = [item for item in items.items if isinstance(item, Named)]
    names = [item.name for item in named]
    if len(named) != len(items.items) or names != sorted(set(names)):
        return None
    return [item.value for item in named]


def _covers(wanted: Sequence[Value], found: Sequence[Value], *, once: bool = False) -> bool:
    """Whether each of `wanted` is among `found`; with `once`, each of `found` for one of them only."""
    if max(len(wanted), len(found)) > _MAX_ITEMS:
        return list(wanted) == list(found)
    left = list(found)
    for value in wanted:
        index = next((i for i, other in enumerate(left) if values_equal(value, other)), None)
        if index is None:
            return False
        if once:
            del left[index]
    return True


def _one_item_equal(gold: Value, answer: Value) -> bool:
    """A set of one number is that number: the one solution."""
    for items, other in ((gold, answer), (answer, gold)):
        if isinstance(items, Items) and items.kind == "{}" and len(items.items) == 1:
            return values_equal(items.items[0], other)
    return False


def _matrices_equal(gold: Value, answer: Value) -> bool:
    first, second = _rows(gold), _rows(answer)
    if first is None or second is None or [len(row) for row in first] != [len(row) for row in second]:
        return False
    return all(expressions_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def _rows(value: Value) -> list[list[Expression]] | None:
    """Rows of a matrix; a tuple of numbers is a column."""
    if isinstance(value, Matrix):
        return [list(row) for row in value.rows]
    if isinstance(value, Items) and value.kind in ("()", "⟨⟩"):
        cells = [[item.expression] for item in value.items if isinstance(item, Scalar) and item.unit is None]
        return cells if len(cells) == len(value.items) else None
    return None


def _relations_equal(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return gold.sign == answer.sign and proportional(
            (gold.left, gold.right), (answer.left, answer.right), positive=gold.sign not in ("=", "≠")
        )
    if isinstance(answer, Relation) and isinstance(gold, Scalar) and (stated := stated_value(answer)) is not None:
        return _scalars_equal(gold, Scalar(stated))
    return False


def _ratios_equal(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        if (gold.is_time and answer.is_time) or len(gold.parts) != len(answer.parts):
            return gold.parts == answer.parts
        pairs = list(zip(gold.parts, answer.parts, strict=True))
        return all(
            expressions_equal(_product(pairs[0][0], b), _product(pairs[0][1], a)) for a, b in pairs[1:]
        ) and not any(_is_zero(part) for part in (*gold.parts, *answer.parts))
    ratio, other = (gold, answer) if isinstance(gold, Ratio) else (answer, gold)
    if not isinstance(ratio, Ratio) or not isinstance(other, Scalar) or len(ratio.parts) != 2 or ratio.is_time:
        return False
    quotient = Expression.of(("div", ratio.parts[0].node, ratio.parts[1].node))
    return other.unit is None and expressions_equal(quotient, other.expression)


def _is_zero(expression: Expression) -> bool:
    return expression.node == ("num", Fraction(0))


def _product(a: Expression, b: Expression) -> Expression:
    return Expression.of(("mul", a.node, b.node), is_decimal=a.is_decimal or b.is_decimal)


def _sets_equal(gold: Pieces, answer: Pieces) -> bool:
    first, second = (_merged(pieces) for pieces in (gold, answer))
    return len(first) == len(second) and all(
        a.low_closed == b.low_closed
        and a.high_closed == b.high_closed
        and expressions_equal(a.low, b.low)
        and expressions_equal(a.high, b.high)
        for a, b in zip(first, second, strict=True)
    )


def _merged(pieces: Pieces) -> list[Piece]:
    """Pieces in order, with those that touch or overlap made one; as they are when their ends have symbols."""
    if any(piece.low.symbols or piece.high.symbols for piece in pieces.pieces) or len(pieces.pieces) > _MAX_ITEMS:
        return list(pieces.pieces)
    found: list[Piece] = []
    for piece in sorted(pieces.pieces, key=cmp_to_key(_order)):
        order = _compared(piece.low, piece.high)
        if order > 0 or (order == 0 and not (piece.low_closed and piece.high_closed)):
            continue  # empty
        if found and _touches(found[-1], piece):
            found[-1] = _joined(found[-1], piece)
        else:
            found.append(piece)
    return found


def _order(a: Piece, b: Piece) -> int:
    return _compared(a.low, b.low) or b.low_closed - a.low_closed


def _touches(a: Piece, b: Piece) -> bool:
    order = _compared(b.low, a.high)
    return order < 0 or (order == 0 and (a.high_closed or b.low_closed) and not infinity_sign(b.low.node))


def _joined(a: Piece, b: Piece) -> Piece:
    order = _compared(a.high, b.high)
    closed = a.high_closed if order > 0 else b.high_closed if order < 0 else a.high_closed or b.high_closed
    return Piece(a.low, a.low_closed, a.high if order >= 0 else b.high, closed)


def _compared(a: Expression, b: Expression) -> int:
    """-1, 0 or 1 as `a` is below, at or above `b`. Raises NoValue where one is no real number."""
    signs = (infinity_sign(a.node), infinity_sign(b.node))
    if signs[0] or signs[1]:
        return (signs[0] > signs[1]) - (signs[0] < signs[1])
    try:
        x, y = exact(a.node, {}), exact(b.node, {})
        return (x > y) - (x < y)
    except (Irrational, TooLarge):
        if expressions_equal(a, b):
            return 0
        context = numeric()
        x, y = context.value(a.node, {}), context.value(b.node, {})
        if not (context.is_real(x) and context.is_real(y)):
            raise NoValue from None
        return 1 if x.real > y.real else -1
