"""The verdict on a mathematical answer by this package's own exact arithmetic; what it cannot read is left to sympy.

Everything here takes a time bounded by the sizes below, so it may run in the caller's process.
"""

from __future__ import annotations

import re

from miles.rollout.rm_hub.math_answer import candidates, stated
from miles.rollout.rm_hub.math_compare import values_equal
from miles.rollout.rm_hub.math_lexer import NotRead, Unknown
from miles.rollout.rm_hub.math_numbers import NoValue, OutOfTime, TooLarge, time_limit
from miles.rollout.rm_hub.math_reader import read
from miles.rollout.rm_hub.math_text import canonical, last_boxed, prose, without_emphasis
from miles.rollout.rm_hub.math_values import Scalar, Value

QUICK_S = 0.02
_MAX_ANSWER = 2000
_MAX_CANONICAL = 20_000
_MAX_DEPTH = 40
_LARGE = re.compile(r"\^\s*[{(]?\s*-?[0-9]{5}|[0-9]{4}[)}\s]*!|(?:\^[^+\-*/=,]{0,40}){4}|[0-9]{400}")
_UNEVALUATED = re.compile(r"\\(?:int|iint|iiint|oint|lim|limsup|liminf|sum|prod)(?![A-Za-z])")
"""What a label without it has carried out, and an answer that repeats the question has not."""
_OPENING = re.compile(r"(?<!\\)[{(\[]")


def answer_of(response: str) -> str | None:
    r"""The content of the last `\boxed{}`, or else what a response states as its answer; None when it states none."""
    if (box := last_boxed(response)) is not None:
        return _unwrapped(box)
    first = None
    for candidate in candidates(response):
        first = candidate if first is None else first
        if is_readable(candidate):
            return candidate
    return first


def _unwrapped(box: str) -> str:
    """`The answer is 5` in a box is 5."""
    if len(box) > _MAX_ANSWER or is_readable(box):
        return box
    plain = without_emphasis(box)
    return next((text for text in (plain, *stated(plain)) if is_readable(text)), box)


def gold_of(label: str) -> str:
    """A label without its box or the `####` before it."""
    box = last_boxed(label)
    return (label if box is None else box).strip()


def is_readable(text: str) -> bool:
    """Whether the text as a whole is mathematics or plain words, for this reader or a larger one."""
    try:
        read(text)
    except Unknown:
        return True
    except NotRead:
        return False
    return True


def is_closed_number(text: str) -> bool:
    """Whether a text is one number without symbols or a unit."""
    try:
        values = read(text)
    except NotRead:
        return False
    return any(isinstance(v, Scalar) and v.unit is None and not v.expression.symbols for v in values)


def judge(answer: str, gold: str, *, limit_s: float | None = QUICK_S) -> bool | None:
    """Whether `answer` is what `gold` is; None when that needs a larger reader, or more time than `limit_s`."""
    if not gold or not answer.strip():
        return False
    if len(answer) <= _MAX_CANONICAL and canonical(answer) == canonical(gold) != "":
        return True
    if len(answer) > _MAX_ANSWER:
        return False
    answers, golds = _values(answer), _values(gold)
    if golds and answers == []:
        return False
    if golds and _UNEVALUATED.search(answer):
        return False
    if golds == [] and (words := prose(gold)) is not None:
        return words == prose(answer)
    if answers and golds:
        try:
            with time_limit(limit_s):
                return any(_equal(g, a) for g in golds for a in answers)
        except OutOfTime:
            return None
    return None if _is_affordable(answer) else False


def _equal(gold: Value, answer: Value) -> bool:
    try:
        return values_equal(gold, answer)
    except (NoValue, TooLarge, NotRead):
        return False


def _values(text: str) -> list[Value] | None:
    """The readings; none when there can be none, None when a larger reader may do better."""
    try:
        return read(text)
    except Unknown:
        return None
    except NotRead:
        return []


def _is_affordable(text: str) -> bool:
    """Whether a larger reader may try: not where its first step would be to write down an enormous number."""
    return len(_OPENING.findall(text)) <= 5 * _MAX_DEPTH and _depth(text) <= _MAX_DEPTH and not _LARGE.search(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "})]":
            depth -= 1
    return deepest
