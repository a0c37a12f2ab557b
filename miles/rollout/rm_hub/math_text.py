"""Mathematical answers as text: the last box, plain numbers, and what counts as the same string. No sympy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

DECIMAL_TOLERANCE = Fraction(1, 10**6)
"""How far apart two numbers may be when one of them is written with a decimal point: this, relative to the larger for
numbers below 1. Numbers without a decimal point must be equal."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_EMPHASIS = re.compile(r"(?P<mark>\*\*|__)(?=\S)(?P<text>.+?)(?<=\S)(?P=mark)")
_MANTISSA = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?)"
_NUMBER = re.compile(rf"(?P<mantissa>{_MANTISSA})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}}))?")
_RATIO = re.compile(r"(?P<top>[+-]?[0-9]+)\s*/\s*(?P<bottom>[0-9]+)")
_SPACES = re.compile(r"\\[,!;: ]|\\q?quad(?![A-Za-z])|~|\s+")
_SIZES = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])")
_WHOLE_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{(?P<text>[^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MAX_DIGITS = 1000
_MAX_BARE = 200


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number written in digits, and whether it has a decimal point or an exponent."""

    value: Fraction
    is_decimal: bool


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`; None without one. Braces are matched, escaped ones do not count."""
    boxes = {match.end() for match in _BOX.finditer(text)}
    if not boxes:
        return None
    found: tuple[int, int] | None = None
    opened: list[int] = []
    for brace in _BRACES.finditer(text, min(boxes) - 1):
        if brace.group() == "{":
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            start = opened.pop()
            if start in boxes and (found is None or start > found[0]):
                found = (start, brace.start())
    return None if found is None else text[slice(*found)]


def without_emphasis(text: str) -> str:
    """Markdown's paired `**` and `__` removed: `**73**` becomes `73`, while `2**3` stays."""
    return _EMPHASIS.sub(lambda match: match["text"], text)


def bare_expression(text: str) -> str | None:
    """The text itself when it is nothing but one short expression: one line without words."""
    text = text.strip()
    is_bare = text and len(text) <= _MAX_BARE and "\n" not in text and not _WORD.search(text)
    return text if is_bare else None


def canonical(text: str) -> str:
    """Text whose equality makes two answers the same: no spaces, `$`, sizes or final dot, one spelling of fractions."""
    text = _trimmed(text)
    text = text.removeprefix(r"\(").removesuffix(r"\)").removeprefix(r"\[").removesuffix(r"\]")
    text = _SIZES.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    if match := _WHOLE_TEXT.fullmatch(text.strip()):
        text = match["text"]
    return _SPACES.sub("", text)


def _trimmed(text: str) -> str:
    """Text without spaces and `$` around it, and without dots at its end."""
    return text.lstrip("$ \t\n").rstrip("$ \t\n.")


def plain_number(text: str) -> PlainNumber | None:
    """The exact number that digits write: `42`, `-1,000.5`, `1.2e1`, `2/3`; None for anything else."""
    text = _trimmed(text)
    if len(text) > _MAX_DIGITS:
        return None
    if match := _RATIO.fullmatch(text):
        bottom = int(match["bottom"])
        return PlainNumber(Fraction(int(match["top"]), bottom), False) if bottom else None
    if match := _NUMBER.fullmatch(text):
        value = Fraction(match["mantissa"].replace(",", ""))
        value *= Fraction(10) ** int(match["exponent"] or 0)
        return PlainNumber(value, "." in match["mantissa"] or match["exponent"] is not None)
    return None


def numbers_equal(a: PlainNumber, b: PlainNumber) -> bool:
    """Whether two numbers are equal: exactly, or within DECIMAL_TOLERANCE when one is a decimal."""
    difference = abs(a.value - b.value)
    if not (a.is_decimal or b.is_decimal):
        return difference == 0
    return difference <= DECIMAL_TOLERANCE * min(1, max(abs(a.value), abs(b.value)))


def quick_verdict(answer: str, gold: str) -> bool | None:
    """The verdict where text alone settles it: equal strings, or two plain numbers; None otherwise."""
    if canonical(answer) == canonical(gold) != "":
        return True
    a, b = plain_number(answer), plain_number(gold)
    return None if a is None or b is None else numbers_equal(a, b)
