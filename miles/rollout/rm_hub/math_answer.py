r"""Where a response states its answer: its last box, or else what it calls the answer, or else where it ends."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator

from miles.rollout.rm_hub.math_text import bare_expression, without_emphasis

TAIL = 4000
_MARKER = re.compile(
    r"(?:\banswer(?:\s+to\s+[^.:\n]{1,80})?\s*(?:is|are|be|=|:)|^####)\s*:?\s*(?:equal to\s+|therefore\s+)?(?P<rest>[^\n]*(?:\n\s*\n?[^\n]+)?)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_MATH = re.compile(r"\$\$?(?P<a>[^$]+)\$?\$|\\\((?P<b>.+?)\\\)|\\\[(?P<c>.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.,])[-+−]?\$?\s?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:\s*/\s*[0-9]+|\s*\\?%)?(?![\w])"
)
_SHORT_BOX = re.compile(r"\\boxed\s+(?P<token>[0-9]+|[A-Za-z](?![A-Za-z]))")
_MAX_MARKERS = 3


def candidates(response: str) -> Iterator[str]:
    """What may be the answer of a response without a box, the likeliest first."""
    text = without_emphasis(response[-TAIL:]).strip()
    if found := _SHORT_BOX.findall(text):
        yield found[-1]
        return
    if (bare := bare_expression(text)) is not None:
        yield bare
    if _MARKER.search(text) is not None:
        yield from stated(text)
        return
    if not text:
        return
    last_line = text.splitlines()[-1].strip()
    yield from _stated(last_line)
    yield from _in_prose(last_line)


def stated(text: str) -> Iterator[str]:
    """What a text calls the answer, the last first."""
    for marker in reversed(list(_MARKER.finditer(text))[-_MAX_MARKERS:]):
        yield from _stated(marker["rest"])


def _stated(rest: str) -> Iterator[str]:
    """What follows `the answer is`, up to the end of the sentence; and the mathematics that it begins with."""
    rest = rest.strip()
    line = rest.split("\n")[0].strip() or rest
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0].strip()
    if line.endswith("!"):  # of an exclamation, not of a factorial
        yield sentence
    yield line
    if sentence != line.removesuffix("."):
        yield sentence
    if (math := _MATH.match(rest)) is not None:
        yield _inside(math)
    elif (number := _NUMBER.match(line)) is not None:
        yield number.group()


def _in_prose(line: str) -> Iterator[str]:
    """The last formula or number of a line, whichever ends later."""
    formula, number = _last(_MATH, line), _last(_NUMBER, line)
    if formula is not None and (number is None or number.end() <= formula.end()):
        yield _inside(formula)
    elif number is not None:
        yield number.group()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = collections.deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _inside(math: re.Match[str]) -> str:
    return next(group for group in math.groups() if group is not None).strip()
