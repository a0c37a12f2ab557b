"""The unit at the end of an answer."""

from __future__ import annotations

from miles.rollout.rm_hub.math_lexer import NotRead, Token
from miles.rollout.rm_hub.math_units import DEGREE, PERCENT, Unit, unit_of


def without_unit(tokens: list[Token]) -> tuple[list[Token], Unit | None]:
    """The tokens before a unit at the end, and the unit. A word that is no unit is one of its own: `5 apples`."""
    start = next((i for i, t in enumerate(tokens) if t.kind in ("unit", "word")), None)
    if not start or (tokens[start].text == "degree" and any(t.kind == "function" for t in tokens)):
        return tokens, None
    parts: list[tuple[str, int]] = []
    sign, prefix = 1, 1
    rest = tokens[start:]
    i = 0
    while i < len(rest):
        token = rest[i]
        if token.kind in ("unit", "word"):
            word = token.text.casefold()
            if word == "per":
                sign = -1
            elif word in ("square", "squared", "sq", "cubic", "cubed"):
                power = 2 if word.startswith("sq") else 3
                if word.endswith("ed") and parts:
                    parts[-1] = (parts[-1][0], parts[-1][1] * power)
                else:
                    prefix = power
            else:
                parts.append((token.text, sign * prefix))
                prefix = 1
        elif token.text == "/":
            sign = -1
        elif token.text == "^" and parts:
            i, power = _unit_power(rest, i + 1)
            parts[-1] = (parts[-1][0], parts[-1][1] * power)
        elif token.kind == "name" and parts:
            parts.append((token.text, sign))
        elif token.text not in ("*", "{", "}"):
            raise NotRead("something follows the unit")
        i += 1
    before = tokens[:start]
    while before and before[-1].kind == "op" and before[-1].text == "*":
        before.pop()
    if before and before[-1].kind == "{" and rest[-1].kind == "}":
        raise NotRead("a unit stands in a group")
    return before, DEGREE if parts == [("degree", 1)] else PERCENT if parts == [("percent", 1)] else unit_of(parts)


def _unit_power(rest: list[Token], i: int) -> tuple[int, int]:
    """Index of the last token of a power, and the power."""
    texts = [t.text for t in rest[i : i + 4]]
    if texts and texts[0] == "{":
        negative = texts[1:2] == ["-"]
        digits = texts[2 if negative else 1 : 3 if negative else 2]
        end = i + (3 if negative else 2)
    else:
        negative, digits, end = False, texts[:1], i
    if not digits or digits[0] not in ("1", "2", "3", "4"):
        raise NotRead("the power of a unit is missing")
    return end, -int(digits[0]) if negative else int(digits[0])
