"""Inequalities: solved ones as sets of real numbers, others as relations in one form."""

from __future__ import annotations

from collections.abc import Sequence

from miles.rollout.rm_hub.math_scalars import Expression
from miles.rollout.rm_hub.math_values import Piece, Pieces, Relation

_INFINITY = Expression(("const", "oo"))
_MINUS_INFINITY = Expression(("neg", ("const", "oo")))
_MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}


def relation(sign: str, left: Expression, right: Expression) -> Relation:
    """The relation with `<` and `≤` only."""
    return Relation(_MIRRORED[sign], right, left) if sign in (">", "≥") else Relation(sign, left, right)


def inequality_pieces(sides: Sequence[Expression], signs: Sequence[str]) -> Pieces | None:
    """The set that `x > 3`, `3 < x` or `1 < x <= 2` write; None for other inequalities."""
    if len(sides) == 2:
        symbol, bound, sign = sides[0], sides[1], signs[0]
        if symbol.node[0] != "sym":
            symbol, bound, sign = bound, symbol, _MIRRORED[sign]
        if symbol.node[0] != "sym" or symbol.symbols & bound.symbols or bound.node[0] == "sym":
            return None
        if sign == "≠":
            return Pieces((Piece(_MINUS_INFINITY, False, bound, False), Piece(bound, False, _INFINITY, False)))
        if sign in ("<", "≤"):
            return Pieces((Piece(_MINUS_INFINITY, False, bound, sign == "≤"),))
        return Pieces((Piece(bound, sign == "≥", _INFINITY, False),))
    if len(sides) != 3 or sides[1].node[0] != "sym" or sides[1].symbols & (sides[0].symbols | sides[2].symbols):
        return None
    if set(signs) <= {"<", "≤"}:
        low, high, first, last = sides[0], sides[2], signs[0], signs[1]
    elif set(signs) <= {">", "≥"}:
        low, high, first, last = sides[2], sides[0], signs[1], signs[0]
    else:
        return None
    return Pieces((Piece(low, first in "≤≥", high, last in "≤≥"),))
