"""Whether two scalar expressions are equal, as numbers or as functions of their symbols.

Closed rational numbers are compared exactly. Rational functions that agree at random points of a large field are equal
but for a chance below 1e-18 (Schwartz 1980, https://doi.org/10.1145/322217.322225). Irrational ones are compared to
forty digits, at several points when they have symbols, wherever both are real.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from miles.rollout.rm_hub.math_numbers import (
    Irrational,
    NoValue,
    Numeric,
    TooLarge,
    check_time,
    exact,
    modular,
    numeric,
)
from miles.rollout.rm_hub.math_parser import Node, symbols_of
from miles.rollout.rm_hub.math_text import DECIMAL_TOLERANCE, PlainNumber, is_rounded, numbers_equal

_PRIMES = (1471954226393891252916782571767, 1603653836357967979230436619)
"""Safe primes: the powers of no small base come round soon."""
_SAME_DIGITS = 40
_CANCELLED_DIGITS = 52
_NUM_EXACT = 4
_NUM_REAL = 3
_MAX_SYMBOLS = 8
_REAL_POINTS = tuple(
    Fraction(p, q)
    for p, q in ((3, 7), (-5, 3), (2, 1), (17, 5), (-11, 13), (7, 9), (-9, 2), (29, 11), (53, 3), (1, 97), (401, 4), (-61, 7))
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expression:
    """A scalar expression and how it was written: with a decimal point, and as nothing but a number's digits."""

    node: Node
    is_decimal: bool = False
    is_literal: bool = False
    symbols: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, node: Node, *, is_decimal: bool = False) -> Expression:
        inner = node[1] if node[0] == "neg" else node
        return cls(node, is_decimal, inner[0] == "num", symbols_of(node))


def expressions_equal(a: Expression, b: Expression) -> bool:
    """Whether two expressions are equal wherever both are real; one without a value equals nothing."""
    check_time()
    if (infinite := infinity_sign(a.node)) or infinity_sign(b.node):
        return infinite == infinity_sign(b.node)
    symbols = sorted(a.symbols | b.symbols)
    if len(symbols) > _MAX_SYMBOLS:
        return False
    try:
        if symbols:
            return _equal_functions(a, b, symbols)
        return _equal_numbers(a, b)
    except (NoValue, TooLarge):
        return False


def roughly_equal(a: Expression, b: Expression) -> bool:
    """Whether two numbers without symbols are within a hundredth of each other."""
    if a.symbols or b.symbols:
        return False
    context = numeric()
    try:
        x, y = context.value(a.node, {}), context.value(b.node, {})
    except (NoValue, TooLarge):
        return False
    return bool(abs(x - y) * 100 <= max(abs(x), abs(y)))


def infinity_sign(node: Node) -> int:
    """1 or -1 for an infinity, 0 for anything else."""
    if node == ("const", "oo"):
        return 1
    return -1 if node == ("neg", ("const", "oo")) else 0


def proportional(a: tuple[Expression, Expression], b: tuple[Expression, Expression], *, positive: bool) -> bool:
    """Whether the differences of two pairs of sides are a constant times each other: not zero, or above it.

    So `2x + 2y = 4` is `x + y = 2`, and `x = x` is no equation at all.
    """
    check_time()
    first, second = (Expression.of(("add", left.node, ("neg", right.node))) for left, right in (a, b))
    symbols = sorted(first.symbols | second.symbols)
    if not symbols or len(symbols) > _MAX_SYMBOLS:
        return False
    zero = Expression.of(("num", Fraction(0)))
    if any(expressions_equal(side, zero) for side in (first, second)):
        return False
    if first.symbols != second.symbols:
        return False
    try:
        points = list(_integer_points(first, second, symbols))
        pairs = [(exact(first.node, point), exact(second.node, point)) for point in points]
        is_same: Callable[[Any, Any], bool] = Fraction.__eq__
    except (Irrational, NoValue, TooLarge):
        context = numeric()
        pairs = list(_real_pairs(context, first, second, symbols))
        is_same = functools.partial(_close, context)
    if len(pairs) < _NUM_REAL or not all(y for _, y in pairs):
        return False
    x, y = pairs[0]
    return not (positive and x / y < 0) and all(is_same(x * other, y * one) for one, other in pairs[1:])


def _real_pairs(context: Numeric, a: Expression, b: Expression, symbols: list[str]) -> Iterator[tuple[Any, Any]]:
    """Values of two expressions at the fixed points where both are real."""
    for start in range(len(_REAL_POINTS)):
        point = {
            name: context.number(_REAL_POINTS[(start + 5 * i) % len(_REAL_POINTS)]) for i, name in enumerate(symbols)
        }
        context.scale = context.ten_to(0) * 0
        try:
            x, y = context.value(a.node, point), context.value(b.node, point)
        except NoValue:
            continue
        if context.is_real(x) and context.is_real(y):
            yield x, y


def _equal_numbers(a: Expression, b: Expression) -> bool:
    try:
        x, y = exact(a.node, {}), exact(b.node, {})
    except Irrational:
        return _equal_numerically(a, b)
    except TooLarge:
        return _equal_huge(a, b)
    first, second = (PlainNumber(v, e.is_decimal, e.is_literal) for v, e in ((x, a), (y, b)))
    return numbers_equal(first, second)


def _equal_huge(a: Expression, b: Expression) -> bool:
    """Numbers too long to write agree modulo two primes and to forty digits, or they differ."""
    try:
        if any(modular(a.node, {}, p) != modular(b.node, {}, p) for p in _PRIMES):
            return False
    except Irrational:
        pass
    return _equal_numerically(a, b)


def _equal_numerically(a: Expression, b: Expression) -> bool:
    context = numeric()
    context.scale = context.ten_to(0) * 0
    x, y = context.value(a.node, {}), context.value(b.node, {})
    if _close(context, x, y):
        return True
    if not (_is_rounded(a) or _is_rounded(b)) or not (context.is_real(x) and context.is_real(y)):
        return False
    return bool(abs(x - y) <= context.number(DECIMAL_TOLERANCE) * min(1, max(abs(x), abs(y))))


def _is_rounded(e: Expression) -> bool:
    return e.is_literal and is_rounded(PlainNumber(exact(e.node, {}), e.is_decimal, e.is_literal))


def _close(context: Numeric, x: Any, y: Any) -> bool:
    difference = abs(x - y)
    if difference <= context.ten_to(-_SAME_DIGITS) * max(abs(x), abs(y)):
        return True
    return bool(difference <= context.ten_to(-_CANCELLED_DIGITS) * context.scale and min(abs(x), abs(y)) <= difference)


def _equal_functions(a: Expression, b: Expression, symbols: list[str]) -> bool:
    try:
        return _equal_at(exact, a, b, symbols, _integer_points(a, b, symbols))
    except Irrational:
        return _equal_where_real(a, b, symbols)
    except TooLarge:
        pass
    try:
        for prime in _PRIMES:
            points = _integer_points(a, b, symbols)
            if not _equal_at(lambda node, point: modular(node, point, prime), a, b, symbols, points):  # noqa: B023
                return False
    except (Irrational, TooLarge):
        return _equal_where_real(a, b, symbols)
    return True


def _equal_at(
    evaluate: Callable[[Node, dict[str, Fraction]], Any],
    a: Expression,
    b: Expression,
    symbols: list[str],
    points: Iterator[dict[str, Fraction]],
) -> bool:
    compared = 0
    for point in points:
        try:
            if evaluate(a.node, point) != evaluate(b.node, point):
                return False
        except NoValue:
            continue
        compared += 1
    return compared >= _NUM_EXACT - 1


def _integer_points(a: Expression, b: Expression, symbols: list[str]) -> Iterator[dict[str, Fraction]]:
    """Points that nobody who writes an answer can know: they depend on both expressions. Signs are mixed."""
    seed = repr((a.node, b.node)).encode()
    for i in range(_NUM_EXACT):
        digest = hashlib.blake2b(seed, digest_size=8 * _MAX_SYMBOLS, salt=bytes([i])).digest()
        point: dict[str, Fraction] = {}
        for j, name in enumerate(symbols):
            size = int.from_bytes(digest[8 * j : 8 * j + 4]) % (1 << 31) + 2
            point[name] = Fraction(size if (i >> (j % 2)) % 2 == 0 else -size)
        yield point


def _equal_where_real(a: Expression, b: Expression, symbols: list[str]) -> bool:
    context = numeric()
    compared = 0
    for x, y in _real_pairs(context, a, b, symbols):
        if not _close(context, x, y):
            return False
        compared += 1
    return compared >= _NUM_REAL
