"""Reading the number that a judge model was asked to end its verdict with."""

from __future__ import annotations

import math
import re

_WORD = r"[^\s*`\"'()\[\]]"
_SCORE = r"[ \t]{0,8}[:=][ \t*_`\"'(\[]{0,16}(?P<score>" + _WORD + r"{1,64})"
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?")


def judge_score(verdict: str, name: str = "Reward") -> float | None:
    """The number after the last `Reward:` of a judge's verdict, whole: `10` is 10 and `1e-1` is 0.1.

    Markdown's emphasis and quotes around it, and a dot or comma after it, do not matter; `7/10` is no number. None when
    there is no such line, or what stands there is no finite number; what to do then is the caller's to say, and a 0
    would be a verdict that nobody gave.
    """
    pattern = re.compile(rf"(?<![A-Za-z]){re.escape(name)}[*_`]{{0,3}}{_SCORE}", re.IGNORECASE)
    last = None
    for last in pattern.finditer(verdict):  # noqa: B007 - the last one counts
        pass
    if last is None:
        return None
    text = last["score"].rstrip(".,;!_")
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None
