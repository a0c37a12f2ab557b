"""Mathematical answers as text: the last box, plain numbers, and what counts as the same string. No sympy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

DECIMAL_TOLERANCE = Fraction(1, 10**6)
"""How far a decimal of six digits or more may be from a number that is not written in digits, such as a fraction or a root:
this, relative to the larger for numbers below 1. Shorter decimals, and integers and decimals among each other, must be equal."""

_ROUNDING = Fraction(1, 10**12)
_FLOAT_DIGITS = 15
_ROUNDED_DIGITS = 6
_BOX = re.compile(r"\\boxed\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_EMPHASIS = re.compile(r"(?P<mark>\*\*|__)(?=\S)(?P<text>.+?)(?<=\S)(?P=mark)")
_MANTISSA = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?)"
_NUMBER = re.compile(rf"(?P<mantissa>{_MANTISSA})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}}))?")
_RATIO = re.compile(r"(?P<top>[+-]?[0-9]+)\s*/\s*(?P<bottom>[0-9]+)")
_SPACES = re.compile(r"(?:\\[,!;: ]|\\q?quad(?![A-Za-z])|~|\s)+")
_BETWEEN_WORDS = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")
_SIZES = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])")
_WHOLE_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{(?P<text>[^{}]*)\}")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\{(?P<text>[^{}\\]*)\}")
_PROSE = re.compile(r"[\w\s.,:;!?'’\"()/&%-]*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MAX_DIGITS = 1000
_MAX_BARE = 200


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A rational number, whether it has a decimal point or an exponent, and whether it was written as digits alone."""

    value: Fraction
    is_decimal: bool
    is_literal: bool = True


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
    """Text whose equality makes two answers the same: without `$`, sizes, final dot and spaces but between words, and one spelling of fractions."""
    text = _trimmed(text)
    text = text.removeprefix(r"\(").removesuffix(r"\)").removeprefix(r"\[").removesuffix(r"\]")
    text = _SIZES.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    if match := _WHOLE_TEXT.fullmatch(text.strip()):
        text = match["text"]
    return _BETWEEN_WORDS.sub("", _SPACES.sub(" ", text))


def _trimmed(text: str) -> str:
    """Text without spaces and `$` around it, and without dots at its end."""
    return text.lstrip("$ \t\n").rstrip("$ \t\n.")


def prose(text: str) -> str | None:
    r"""Words, digits and plain punctuation in one case, such as `june 20` for `\text{June 20}`; None for anything else."""
    text = _TEXT_COMMAND.sub(lambda found: f" {found['text']} ", _trimmed(text)).replace("$", "")
    if not _PROSE.fullmatch(text) or not _WORD.search(text.replace(".", "")):
        return None
    return " ".join(text.replace(".", "").casefold().split())


def plain_number(text: str) -> PlainNumber | None:
    """The exact number that digits write: `42`, `-1,000.5`, `1.2e1`, `2/3`; None for anything else."""
    text = _trimmed(text)
    if len(text) > _MAX_DIGITS:
        return None
    if match := _RATIO.fullmatch(text):
        bottom = int(match["bottom"])
        return PlainNumber(Fraction(int(match["top"]), bottom), False, False) if bottom else None
    if match := _NUMBER.fullmatch(text):
        value = Fraction(match["mantissa"].replace(",", ""))
        value *= Fraction(10) ** int(match["exponent"] or 0)
        return PlainNumber(value, "." in match["mantissa"] or match["exponent"] is not None)
    return None


def numbers_equal(a: PlainNumber, b: PlainNumber) -> bool:
    """Whether two numbers are equal: exactly, or within DECIMAL_TOLERANCE when a long decimal stands for a fraction.

    Two decimals of which one has the fifteen digits of a float may differ by its rounding.
    """
    if a.value == b.value:
        return True
    if a.is_literal and b.is_literal:
        is_float = a.is_decimal and b.is_decimal and max(num_digits(a.value), num_digits(b.value)) >= _FLOAT_DIGITS
        tolerance = _ROUNDING if is_float else None
    else:
        tolerance = DECIMAL_TOLERANCE if is_rounded(a) or is_rounded(b) else None
    return tolerance is not None and abs(a.value - b.value) <= tolerance * min(1, max(abs(a.value), abs(b.value)))


def is_rounded(number: PlainNumber) -> bool:
    """Whether a number is a decimal long enough to stand for one that it is not equal to."""
    return number.is_decimal and number.is_literal and num_digits(number.value) >= _ROUNDED_DIGITS


def num_digits(decimal: Fraction) -> int:
    """Significant digits of a number that a decimal writes."""
    power = max(decimal.denominator.bit_length() - 1, 0)
    return len(str(abs(decimal.numerator) * 10**power // decimal.denominator).strip("0"))


def quick_verdict(answer: str, gold: str) -> bool | None:
    """The verdict where text alone settles it: equal strings, or two plain numbers; None otherwise."""
    if canonical(answer) == canonical(gold) != "":
        return True
    a, b = plain_number(answer), plain_number(gold)
    return None if a is None or b is None else numbers_equal(a, b)
