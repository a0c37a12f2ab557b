"""What an answer may be: a number with a unit, a list, a tuple, a set of real numbers, a matrix, a relation, words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.rollout.rm_hub.math_scalars import Expression
from miles.rollout.rm_hub.math_units import Unit


@dataclass(frozen=True, slots=True)
class Scalar:
    """An expression, with a unit or without."""

    expression: Expression
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """Several values: a bare list or a set, whose order does not matter, or a tuple in the brackets of `kind`."""

    kind: Literal["list", "{}", "()", "[]", "⟨⟩"]
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of real numbers; a point is closed at both ends, which are equal."""

    low: Expression
    low_closed: bool
    high: Expression
    high_closed: bool


@dataclass(frozen=True, slots=True)
class Pieces:
    """A union of intervals and points."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of expressions."""

    rows: tuple[tuple[Expression, ...], ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A value with a name before an equals sign: `x = 5`, `f(x) = x^2`."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality that is not solved for one symbol; `sign` is one of `=`, `<`, `≤`, `≠`."""

    sign: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Ratio:
    """`a : b : c`; `is_time` when it may be a time of day."""

    parts: tuple[Expression, ...]
    is_time: bool


@dataclass(frozen=True, slots=True)
class Words:
    """Prose without mathematics, in one case and with single spaces."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A lettered choice with its content: `(C) 12`."""

    letter: str
    content: Value | None


Value = Scalar | Items | Pieces | Matrix | Named | Relation | Ratio | Words | Choice
