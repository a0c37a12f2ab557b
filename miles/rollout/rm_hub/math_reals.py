"""Values of an answer as sets of real numbers."""

from __future__ import annotations

import itertools

from miles.rollout.rm_hub.math_lexer import Unknown
from miles.rollout.rm_hub.math_numbers import Irrational, NoValue, TooLarge, exact
from miles.rollout.rm_hub.math_scalars import Expression, infinity_sign
from miles.rollout.rm_hub.math_values import Items, Piece, Pieces, Scalar, Value


def real_line() -> Piece:
    """All real numbers."""
    return Piece(Expression(("neg", ("const", "oo"))), False, Expression(("const", "oo")), False)


def without_points(whole: Pieces, removed: Pieces) -> Pieces:
    """The real line without points. Raises Unknown for any other difference of sets."""
    points = sorted((p.low for p in removed.pieces), key=_sortable)
    is_line = (
        len(whole.pieces) == 1 and infinity_sign(whole.pieces[0].low.node) and infinity_sign(whole.pieces[0].high.node)
    )
    if not is_line or not all(p.low == p.high for p in removed.pieces):
        raise Unknown("it has a difference of sets")
    ends = [real_line().low, *points, real_line().high]
    return Pieces(tuple(Piece(a, False, b, False) for a, b in itertools.pairwise(ends)))


def _sortable(expression: Expression) -> float:
    try:
        return float(exact(expression.node, {}))
    except (Irrational, NoValue, TooLarge, OverflowError, KeyError):
        raise Unknown("its points cannot be sorted") from None


def set_of_reals(value: Value) -> Pieces:
    """`as_pieces`; raises Unknown where a value is no such set."""
    if (pieces := as_pieces(value)) is None:
        raise Unknown("it is no set of real numbers")
    return pieces


def as_pieces(value: Value) -> Pieces | None:
    """A value as a set of real numbers, where it can be one: `(1, 2)`, `[1, 2]` and `{1, 2}` can."""
    if isinstance(value, Pieces):
        return value
    if not isinstance(value, Items) or value.kind not in ("()", "[]", "{}"):
        return None
    ends = [item.expression for item in value.items if isinstance(item, Scalar) and item.unit is None]
    if len(ends) != len(value.items):
        return None
    if value.kind == "{}":
        return Pieces(tuple(Piece(end, True, end, True) for end in ends))
    closed = value.kind == "[]"
    return Pieces((Piece(ends[0], closed, ends[1], closed),)) if len(ends) == 2 else None
