"""Whether a mathematical answer equals the label, by math-verify and sympy. Runs in a worker process only.

math-verify compares some numbers with an absolute tolerance and some texts by a fragment of them. So here an answer is
parsed as a whole or not at all, closed numbers are compared exactly (decimals: relatively), and nothing that is too
large to write down is evaluated. Whatever else hangs is ended from outside.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from miles.rollout.rm_hub.math_judge import judge
from miles.rollout.rm_hub.math_text import DECIMAL_TOLERANCE, plain_number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; ours is outside

_NORMALISE = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all", equations=False
)
_MAX_LENGTH = 2000
_MAX_BITS = 2.0**21
_DIGITS = 30
_AGREE = sympy.Rational(1, 10**20)
_POINTS = tuple(
    sympy.Rational(p, q) for p, q in ((3, 7), (-5, 3), (2, 1), (-11, 13), (17, 5), (-1, 4), (7, 9), (-9, 2))
)
_MIN_POINTS = 3
_MAX_SYMBOLS = 4


def grade(answer: str, gold: str) -> dict[str, Any]:
    """`{"correct": bool, "label_problem": str | None}` for an answer and a label without their boxes."""
    verdict = judge(answer, gold, limit_s=None)
    if verdict is not None:
        return {"correct": verdict, "label_problem": None}
    expected, problem = parse_gold(gold)
    if expected is None:
        return {"correct": False, "label_problem": problem}
    found = _parse_whole(answer)
    correct = found is not None and _attempt(_equal, expected, found) is True
    return {"correct": correct, "label_problem": None}


@functools.lru_cache(maxsize=1024)
def parse_gold(gold: str) -> tuple[Any, str | None]:
    """The label as an expression, or None and what is wrong with it."""
    expression = _parse_whole(gold)
    if expression is None:
        return None, f"the label {gold!r:.200} cannot be read as mathematics"
    return expression, None


def _parse_whole(text: str) -> Any:
    """The whole text as one expression; None when some of it cannot be read."""
    if (number := plain_number(text)) is not None:
        value = sympy.Rational(number.value.numerator, number.value.denominator)
        return sympy.Float(value, 50) if number.is_decimal else value
    return None if len(text) > _MAX_LENGTH or not text.strip() else _attempt(_parse_latex, text)


def _parse_latex(text: str) -> Any:
    text = normalize_latex(text, config=_NORMALISE)
    return latex2sympy(
        text, is_real=not should_treat_as_complex(text), convert_degrees=False, normalization_config=None
    )


def _attempt(function: Any, *args: Any) -> Any:
    """`function(*args)`; None for whatever the parser or sympy raises on text that a model wrote."""
    try:
        return function(*args)
    except Exception:  # noqa: BLE001
        return None


def _equal(gold: Any, found: Any) -> bool:
    if _bits(gold) > _MAX_BITS or _bits(found) > _MAX_BITS:
        return False
    if _is_closed_number(gold) and _is_closed_number(found):
        return _closed_numbers_equal(gold, found)
    return verify(gold, found, timeout_seconds=None) or _equal_as_functions(gold, found)


def _is_closed_number(expression: Any) -> bool:
    return (
        isinstance(expression, sympy.Expr)
        and not expression.free_symbols
        and not expression.has(sympy.UnevaluatedExpr, sympy.zoo, sympy.nan, sympy.oo, -sympy.oo, sympy.MatrixExpr)
    )


def _closed_numbers_equal(a: Any, b: Any) -> bool:
    is_decimal = bool(a.atoms(sympy.Float) or b.atoms(sympy.Float))
    a, b = (sympy.nsimplify(x, rational=True) if x.has(sympy.Float) else x for x in (a, b))
    if isinstance(a, sympy.Rational) and isinstance(b, sympy.Rational) and not is_decimal:
        return a == b
    a, b = a.evalf(_DIGITS), b.evalf(_DIGITS)
    size = sympy.Max(abs(a), abs(b))
    if is_decimal:
        return bool(abs(a - b) <= sympy.Rational(DECIMAL_TOLERANCE) * sympy.Min(1, size) * (1 + _AGREE))
    return bool(abs(a - b) <= _AGREE * size)


def _equal_as_functions(a: Any, b: Any) -> bool:
    """Whether two expressions in the same symbols agree wherever both are real, by their values at fixed points."""
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)) or a.has(sympy.core.function.AppliedUndef):
        return False
    names = sorted(str(s) for s in a.free_symbols)
    if sorted(str(s) for s in b.free_symbols) != names or not 1 <= len(names) <= _MAX_SYMBOLS:
        return False
    compared = 0
    for start in range(len(_POINTS)):
        values = {name: _POINTS[(start + 3 * i) % len(_POINTS)] for i, name in enumerate(names)}
        x, y = (e.subs({s: values[str(s)] for s in e.free_symbols}).evalf(_DIGITS) for e in (a, b))
        if not (x.is_real and y.is_real and x.is_finite and y.is_finite):
            continue
        if abs(x - y) > _AGREE * sympy.Max(abs(x), abs(y)):
            return False
        compared += 1
    return compared >= _MIN_POINTS


def _bits(expression: Any) -> float:
    """About how many bits the largest number in an expression has once evaluated; inf when that is beyond saying."""
    if isinstance(expression, sympy.Rational):
        return float(max(abs(expression.p).bit_length(), expression.q.bit_length()))
    args = tuple(expression.flat()) if isinstance(expression, sympy.MatrixBase) else getattr(expression, "args", ())
    sizes = [_bits(arg) for arg in args]
    largest = max(sizes, default=1.0)
    if isinstance(expression, sympy.Pow | sympy.exp) and not expression.args[-1].free_symbols:
        return max(largest, sizes[0] * _magnitude(expression.args[-1], sizes[-1]))
    if isinstance(expression, sympy.factorial | sympy.binomial | sympy.gamma):
        return math.inf if largest > 17 else largest * 2.0**largest
    if isinstance(expression, sympy.Mul):
        return sum(sizes)
    return largest + len(sizes) if isinstance(expression, sympy.Add) else largest


def _magnitude(exponent: Any, bits: float) -> float:
    """An upper bound of an exponent's absolute value; inf when it has more than 64 bits."""
    if bits > 64:
        return math.inf
    return abs(float(exponent)) if isinstance(exponent, sympy.Number) else 2.0**bits
