"""What stands where among the tokens of an answer: subscripts, degrees and percent joined, brackets, parts between separators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles.rollout.rm_hub.math_lexer import NotRead, Token


def joined(tokens: Sequence[Token]) -> list[Token]:
    """Subscripts joined to their symbols, degree signs and percent signs as units."""
    found: list[Token] = []
    i = 0
    tokens = list(tokens)
    while i < len(tokens):
        token = tokens[i]
        rest = [t.text for t in tokens[i : i + 4]]
        if token.text == "^" and rest[1:2] == ["circ"]:
            found.append(Token("unit", "degree"))
            i += 2
        elif token.text == "^" and rest[1:4] == ["{", "circ", "}"]:
            found.append(Token("unit", "degree"))
            i += 4
        elif token.kind == "op" and token.text == "%":
            found.append(Token("unit", "percent"))
            i += 1
        elif token.kind == "op" and token.text == "_" and found and found[-1].kind in ("name", "number"):
            i, subscript = _subscript(tokens, i + 1)
            last = found.pop()
            if last.kind == "name":
                found.append(replace(last, text=f"{last.text}_{subscript}"))
            else:
                found += [last, Token("unit", f"base {subscript}")]
        else:
            found.append(token)
            i += 1
    return found


def _subscript(tokens: list[Token], i: int) -> tuple[int, str]:
    if i < len(tokens) and tokens[i].kind in ("name", "number", "word"):
        return i + 1, tokens[i].text
    if i < len(tokens) and tokens[i].kind == "{":
        end = next((j for j in range(i, len(tokens)) if tokens[j].kind == "}"), None)
        if end is not None:
            return end + 1, "".join(token.text for token in tokens[i + 1 : end])
    raise NotRead("a subscript is missing")


def depths(tokens: Sequence[Token]) -> list[int]:
    """Depth of each token; a bracket has the depth outside of it. Raises NotRead when they do not match."""
    depth, found = 0, []
    for token in tokens:
        if token.kind in ("close", "}") or (token.kind == "command" and token.text.startswith("end ")):
            depth -= 1
        if depth < 0:
            raise NotRead("its brackets do not match")
        found.append(depth)
        if token.kind in ("open", "{") or (token.kind == "command" and token.text.startswith("begin ")):
            depth += 1
    if depth:
        raise NotRead("its brackets do not match")
    return found


def at_top(tokens: Sequence[Token]) -> list[Token]:
    return [token for token, depth in zip(tokens, depths(tokens), strict=True) if depth == 0]


def split_at(tokens: Sequence[Token], is_separator: Any) -> tuple[list[list[Token]], list[str]]:
    """Parts between separators outside of brackets, without empty ones beside `and` and `or`; and the separators."""
    parts: list[list[Token]] = [[]]
    signs: list[str] = []
    for token, depth in zip(tokens, depths(tokens), strict=True):
        if depth == 0 and is_separator(token):
            if not parts[-1] and signs and token.text in ("and", "or"):
                signs[-1] = token.text
                continue
            signs.append(token.text)
            parts.append([])
        else:
            parts[-1].append(token)
    if signs and not all(parts):
        raise NotRead("an item is missing")
    return parts, signs
