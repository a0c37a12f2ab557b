"""Values of expressions: exact over the rationals, modulo primes where numbers are too long to write, or to sixty digits
where they are irrational. Every function here takes a bounded time: what cannot be afforded raises TooLarge.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from miles.rollout.rm_hub.math_parser import Node

Point = Mapping[str, Fraction]

MAX_BITS = 1 << 13
DIGITS = 60
_MAX_EXPONENT = 1 << 64
_MAX_FACTORIAL = 5_000
_MAX_EXACT_FACTORIAL = 900
_MAX_EXACT_CHOICE = 2_000


class NoValue(ArithmeticError):
    """The expression has no value there: a division by zero, say."""


class Irrational(ArithmeticError):
    """The value is not rational, or not known to be."""


class TooLarge(ArithmeticError):
    """The value is too long to be written or worked out."""


class OutOfTime(Exception):
    """The time that `time_limit` gives is over."""


_THREAD = threading.local()


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Comparisons that this thread starts after `seconds` of its processor time raise OutOfTime; one takes at most some hundredths."""
    _THREAD.deadline = None if seconds is None else time.thread_time() + seconds
    try:
        yield
    finally:
        _THREAD.deadline = None


def check_time() -> None:
    """Raises OutOfTime when this thread's limit is over."""
    deadline = getattr(_THREAD, "deadline", None)
    if deadline is not None and time.thread_time() > deadline:
        raise OutOfTime


def exact(node: Node, point: Point) -> Fraction:
    """The rational value with the symbols at `point`. Raises NoValue, Irrational or TooLarge."""
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind == "sym":
        return point[node[1]]
    if kind == "const":
        raise (NoValue if node[1] == "oo" else Irrational)
    if kind == "fn":
        return _exact_function(node[1], exact(node[2], point))
    if kind == "log":
        if node[1] is None:
            raise Irrational
        return _exact_log(exact(node[1], point), exact(node[2], point))
    a = exact(node[1], point)
    if kind == "neg":
        return -a
    if kind == "fact":
        return Fraction(math.factorial(_natural(a, _MAX_EXACT_FACTORIAL)))
    b = exact(node[2], point)
    if kind == "root":
        return _exact_root(b, a)
    if kind == "binom":
        return _exact_choice(a, b)
    return _arithmetic(kind, a, b)


def _arithmetic(kind: str, a: Fraction, b: Fraction) -> Fraction:
    if kind == "add":
        value = a + b
    elif kind == "mul":
        value = a * b
    elif kind == "div":
        if not b:
            raise NoValue
        value = a / b
    else:
        value = _exact_power(a, b)
    if _bits(value) > MAX_BITS:
        raise TooLarge
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _natural(value: Fraction, limit: int) -> int:
    if value.denominator != 1 or value < 0:
        raise NoValue
    if value > limit:
        raise TooLarge
    return value.numerator


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _exact_power(_exact_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
    if not base and exponent <= 0:
        raise NoValue
    if base in (0, 1):
        return base
    if base == -1:
        return base if exponent.numerator % 2 else -base
    if abs(exponent) > MAX_BITS or _bits(base) * abs(exponent) > MAX_BITS:
        raise TooLarge
    return base**exponent.numerator


def _exact_root(value: Fraction, degree: Fraction) -> Fraction:
    """The real root where it is rational: of a non-negative value, or an odd one of a negative value."""
    if degree.denominator != 1 or degree < 1:
        raise Irrational
    n = degree.numerator
    if n == 1:
        return value
    if n > 64 or (value < 0 and n % 2 == 0):
        raise Irrational
    size = abs(value)
    root = Fraction(_integer_root(size.numerator, n), _integer_root(size.denominator, n))
    return root if value >= 0 else -root


def _integer_root(value: int, n: int) -> int:
    if n == 2:
        root = math.isqrt(value)
    else:
        root = 1 << -(-value.bit_length() // n)
        while value and (lower := ((n - 1) * root + value // root ** (n - 1)) // n) < root:
            root = lower
        root = root if value else 0
    if root**n != value:
        raise Irrational
    return root


def _exact_choice(n: Fraction, k: Fraction) -> Fraction:
    top, bottom = _natural(n, _MAX_EXACT_CHOICE), _natural(k, _MAX_EXACT_CHOICE)
    if min(bottom, top - bottom) * max(top.bit_length(), 1) > MAX_BITS:
        raise TooLarge
    return Fraction(math.comb(top, bottom))


def _exact_log(base: Fraction, value: Fraction) -> Fraction:
    if base <= 0 or base == 1 or value <= 0:
        raise NoValue
    if value == 1:
        return Fraction(0)
    guess = Fraction(round(math.log(value) / math.log(base))) if max(_bits(base), _bits(value)) < 900 else Fraction(0)
    if abs(guess) < 900 and _exact_power(base, guess) == value:
        return guess
    raise Irrational


def _exact_function(name: str, value: Fraction) -> Fraction:
    if name == "abs":
        return abs(value)
    if name in ("floor", "ceil"):
        return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
    if value == 0 and name in ("sin", "tan", "arcsin", "arctan", "sinh", "tanh"):
        return value
    if (value == 0 and name in ("cos", "sec", "cosh")) or (value == 1 and name == "ln"):
        return Fraction(name != "ln")
    raise Irrational


def modular(node: Node, point: Point, prime: int) -> int:
    """The value modulo a prime, so that `7^(10^10)` costs nothing. Raises NoValue, Irrational or TooLarge."""
    kind = node[0]
    if kind in ("num", "sym"):
        value = node[1] if kind == "num" else point[node[1]]
        return value.numerator * _inverse(value.denominator, prime) % prime
    if kind == "fact":
        return _modular_factorial(_natural(exact(node[1], point), _MAX_FACTORIAL), prime)
    if kind == "pow":
        return _modular_power(node, point, prime)
    if kind == "neg":
        return -modular(node[1], point, prime) % prime
    if kind in ("add", "mul", "div"):
        a, b = modular(node[1], point, prime), modular(node[2], point, prime)
        if kind == "add":
            return (a + b) % prime
        return a * (b if kind == "mul" else _inverse(b, prime)) % prime
    value = exact(node, point)
    return value.numerator * _inverse(value.denominator, prime) % prime


def _inverse(value: int, prime: int) -> int:
    if value % prime == 0:
        raise NoValue
    return pow(value, -1, prime)


def _modular_factorial(n: int, prime: int) -> int:
    value = 1
    for i in range(2, n + 1):
        value = value * i % prime
    return value


def _modular_power(node: Node, point: Point, prime: int) -> int:
    exponent = exact(node[2], point)
    if exponent.denominator != 1:
        value = exact(node, point)
        return value.numerator * _inverse(value.denominator, prime) % prime
    if _bits(exponent) > MAX_BITS // 4:
        raise TooLarge
    base = modular(node[1], point, prime)
    if base == 0 and exponent <= 0:
        raise NoValue
    return pow(base, exponent.numerator, prime)


class Numeric:
    """Values to sixty digits, complex ones too. One object serves one thread: mpmath changes its context as it works."""

    def __init__(self) -> None:
        self._mp: Any = mpmath.MPContext()
        self._mp.dps = DIGITS
        self.scale: Any = self._mp.mpf(0)
        """The largest term of a sum since it was last set to zero: what may have been cancelled against."""

    def value(self, node: Node, point: Mapping[str, Any]) -> Any:
        """A finite `mpf` or `mpc`. Raises NoValue or TooLarge."""
        try:
            found = self._value(node, point)
        except (ValueError, ZeroDivisionError, OverflowError, self._mp.NoConvergence) as error:
            raise NoValue from error
        if not self._mp.isfinite(found):
            raise NoValue
        return found

    def number(self, value: Fraction) -> Any:
        """A rational number to sixty digits."""
        return self._mp.mpf(value.numerator) / value.denominator

    def is_real(self, value: Any) -> bool:
        """Whether the imaginary part is nothing but rounding."""
        return not isinstance(value, self._mp.mpc) or abs(value.imag) <= self._mp.mpf(10) ** -50 * abs(value)

    def ten_to(self, exponent: int) -> Any:
        return self._mp.mpf(10) ** exponent

    def _value(self, node: Node, point: Mapping[str, Any]) -> Any:
        kind = node[0]
        if kind == "num":
            return self.number(node[1])
        if kind == "sym":
            return point[node[1]]
        if kind == "const":
            return self._constant(node[1])
        if kind == "fn":
            return self._function(node[1], self._value(node[2], point))
        if kind == "log":
            value = self._mp.log(self._value(node[2], point))
            return value / self._mp.log(10 if node[1] is None else self._value(node[1], point))
        a = self._value(node[1], point)
        if kind == "neg":
            return -a
        if kind == "fact":
            return self._mp.factorial(self._small(a, _MAX_FACTORIAL))
        b = self._value(node[2], point)
        return self._two(kind, a, b)

    def _two(self, kind: str, a: Any, b: Any) -> Any:
        if kind == "add":
            self.scale = max(self.scale, abs(a), abs(b))
            return a + b
        if kind == "mul":
            return a * b
        if kind == "div":
            return a / b
        if kind == "root":
            return self._root(b, a)
        if kind == "binom":
            return self._mp.binomial(self._small(a, _MAX_FACTORIAL), self._small(b, _MAX_FACTORIAL))
        return self._small(a, None) ** self._small(b, _MAX_EXPONENT)

    def _root(self, value: Any, degree: Any) -> Any:
        if degree == 2:
            return self._mp.sqrt(value)
        if not self._mp.isint(degree) or not 1 <= degree <= 1000:
            return value ** (1 / self._small(degree, _MAX_EXPONENT))
        if self.is_real(value) and self._mp.re(value) < 0 and int(degree) % 2:
            return -self._mp.root(-self._mp.re(value), int(degree))
        return self._mp.root(value, int(degree))

    def _small(self, value: Any, limit: int | None) -> Any:
        """The value itself, when what is worked out from it costs a bounded time."""
        if limit is not None and abs(value) > limit:
            raise TooLarge
        if abs(self._mp.mag(value) if value else 0) > 1 << 80:
            raise TooLarge
        return value

    def _constant(self, name: str) -> Any:
        if name == "oo":
            raise NoValue
        return {"pi": self._mp.pi, "e": self._mp.e, "i": self._mp.j}[name] * 1

    def _function(self, name: str, value: Any) -> Any:
        self._small(value, None if name in ("abs", "ln", "lg") else _MAX_EXPONENT)
        names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "abs": "fabs", "lg": "log10"}
        function = getattr(self._mp, names.get(name, name))
        if name in ("abs", "floor", "ceil"):
            return abs(value) if name == "abs" else function(value)
        result = function(value)
        if name in ("tan", "sec", "csc", "cot") and abs(result) > self.ten_to(50):
            raise NoValue
        return result


def numeric() -> Numeric:
    """This thread's evaluator."""
    if not hasattr(_THREAD, "numeric"):
        _THREAD.numeric = Numeric()
    return _THREAD.numeric
