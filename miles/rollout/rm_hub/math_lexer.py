r"""Tokens of a mathematical answer, written in LaTeX, in plain text or in a mixture of both. Linear in its length."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from miles.rollout.rm_hub.math_units import is_unit_name
from miles.rollout.rm_hub.math_vocabulary import (
    BRACKET_COMMANDS,
    DROPPED_COMMANDS,
    FUNCTION_ALIASES,
    FUNCTIONS,
    GREEK_LETTERS,
    NAMED_SYMBOLS,
    OPERATOR_COMMANDS,
    PROSE_WORDS,
    STRUCTURE_COMMANDS,
    TEXT_COMMANDS,
    UNICODE_AS_LATEX,
    USUAL_SYMBOLS,
)

MAX_LENGTH = 1000
MAX_TOKENS = 400
MAX_DEPTH = 40
MAX_DIGITS = 1000

Kind = Literal[
    "number", "name", "function", "op", "open", "close", "{", "}", "word", "unit", "sep", "command", "script"
]


class NotRead(ValueError):
    """The text is not a mathematical answer of the kinds that this reader knows."""


class Unknown(NotRead):
    """It has a part that a larger reader may know, such as a sum or an integral."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token. `value` is set for numbers; `spaced` says that white space came before it."""

    kind: Kind
    text: str
    value: Fraction | None = None
    spaced: bool = False


_TOKEN = re.compile(
    r"""(?P<space>(?:\s|~|\\[,;:!>\ ])+)
    |(?P<newline>\\\\)
    |(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z.]))?|[0-9]+\.(?![0-9]))
    |\\(?P<command>[A-Za-z]+)\*?
    |\\(?P<escaped>[{}%$|&_\#])
    |(?P<word>[A-Za-z]+)
    |(?P<power>\*\*)
    |(?P<order><=|>=|!=|=<)
    |(?P<op>[-+*/^_=<>≤≥≠±∓!%|:,;∪∩∈∖&'≈])
    |(?P<open>[(\[])|(?P<close>[)\]])
    |(?P<brace>[{}])""",
    re.VERBOSE,
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\\,|\\ |\{,\}| |,\\!)[0-9]{3})+(?![0-9]|,[0-9])")
_REPEATING = re.compile(
    r"(?P<whole>[0-9]{0,9})\.(?P<fixed>[0-9]{0,9})\\(?:overline|bar)\s*(?:\{(?P<period>[0-9]{1,20})\}|(?P<digit>[0-9]))"
)
_SPACE = re.compile(r"(?<!\\)\\ ")
_NOT_DIGITS = re.compile(r"[^0-9]+")


def thousands_removed(text: str) -> str:
    """`1,234` as `1234`; lists such as `1, 234` and `1,2` stay."""
    return _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)


def _as_fraction(found: re.Match[str]) -> str:
    """`0.1\\overline{6}` as the fraction that it is."""
    start, period = found["whole"] + found["fixed"] or "0", found["period"] or found["digit"]
    nines = 10 ** len(period) - 1
    return rf"{{\frac{{{int(start) * nines + int(period)}}}{{{nines * 10 ** len(found['fixed'])}}}}}"


def prepared(text: str) -> str:
    """The text with Unicode signs as LaTeX, and without dollar signs, delimiters and unambiguous digit grouping.

    Raises NotRead for what is too long.
    """
    if len(text) > MAX_LENGTH:
        raise NotRead("it is too long")
    text = _SPACE.sub(" ", text.translate(UNICODE_AS_LATEX))
    if r"\overline" in text or r"\bar" in text:
        text = _REPEATING.sub(_as_fraction, text)
    text = _SPACED_THOUSANDS.sub(lambda found: _NOT_DIGITS.sub("", found.group()), text)
    text = text.replace(r"\$", "").replace("$", "").replace(r"\(", "").replace(r"\)", "")
    text = text.replace(r"\[", "").replace(r"\]", "").replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = text.replace(r"\cfrac", r"\frac").replace(r"\dbinom", r"\binom").replace(r"\tbinom", r"\binom")
    text = text.replace(r"\left.", "").replace(r"\right.", "").strip()
    text = text.removeprefix(r"\approx").lstrip()
    while text and text[-1] in ".,;" and not text.endswith(r"\,"):
        text = text[:-1].rstrip()
    return text


def tokens_of(text: str) -> list[Token]:
    """Tokens of a text that `prepared` gave. Raises NotRead for a character that means nothing here, or too many tokens."""
    found: list[Token] = []
    position, depth, spaced = 0, 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotRead(f"{text[position]!r} means nothing in it")
        position = match.end()
        kind = match.lastgroup
        if kind == "space":
            spaced = True
            continue
        if kind == "command":
            position = _command(found, text, position, match["command"], spaced)
        elif kind == "word":
            _words(found, match["word"], spaced)
        else:
            assert kind is not None
            found.append(_simple(kind, match.group(), spaced))
        spaced = False
        if found and found[-1].kind in ("open", "close", "{", "}"):
            depth += 1 if found[-1].kind in ("open", "{") else -1
            if depth > MAX_DEPTH:
                raise NotRead("it is nested too deeply")
        if len(found) > MAX_TOKENS:
            raise NotRead("it has too many parts")
    return found


def _simple(kind: str, text: str, spaced: bool) -> Token:
    if kind == "number":
        if len(text) > MAX_DIGITS:
            raise NotRead("it has too many digits")
        return Token("number", text, Fraction(text.removesuffix(".")), spaced)
    if kind == "power":
        return Token("op", "^", spaced=spaced)
    if kind == "order":
        return Token("op", {"<=": "≤", "=<": "≤", ">=": "≥", "!=": "≠"}[text], spaced=spaced)
    if kind == "newline":
        return Token("op", r"\\", spaced=spaced)
    if kind == "escaped":
        return _escaped(text[1], spaced)
    if kind in ("open", "close"):
        return Token("open" if kind == "open" else "close", text, spaced=spaced)
    if kind == "brace":
        return Token("{" if text == "{" else "}", text, spaced=spaced)
    if text in ",;":
        return Token("sep", text, spaced=spaced)
    return Token("op", text, spaced=spaced)


def _escaped(char: str, spaced: bool) -> Token:
    if char == "{":
        return Token("open", "S{", spaced=spaced)
    if char == "}":
        return Token("close", "S}", spaced=spaced)
    if char == "|":
        raise Unknown("it has a norm")
    return Token("op", char, spaced=spaced)


def _command(found: list[Token], text: str, position: int, name: str, spaced: bool) -> int:
    """Append what a LaTeX command means; the position after it and the text that it takes."""
    if name in DROPPED_COMMANDS:
        return position
    if name in TEXT_COMMANDS or name in ("mathbb", "begin", "end"):
        return _command_with_text(found, text, position, name, spaced)
    if name in FUNCTIONS and name != "sqrt":
        found.append(Token("function", name, spaced=spaced))
    elif name in OPERATOR_COMMANDS:
        sign = OPERATOR_COMMANDS[name]
        found.append(Token("sep" if sign in ("or", "and") else "op", sign, spaced=spaced))
    elif name in NAMED_SYMBOLS:
        found.append(Token("name", NAMED_SYMBOLS[name], spaced=spaced))
    elif name in GREEK_LETTERS:
        found.append(Token("name", name, spaced=spaced))
    elif name in BRACKET_COMMANDS:
        kind, sign = BRACKET_COMMANDS[name]
        found.append(Token("open" if kind == "open" else "close", sign, spaced=spaced))
    elif name in STRUCTURE_COMMANDS:
        found.append(Token("command", name, spaced=spaced))
    else:
        raise Unknown(f"\\{name} is not known")
    return position


def _command_with_text(found: list[Token], text: str, position: int, name: str, spaced: bool) -> int:
    start = position
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] != "{":
        if name in ("rm", "bf"):
            return position
        raise Unknown(f"\\{name} has no braces")
    end = text.find("}", start)
    if end < 0:
        raise NotRead("its braces do not match")
    inside = text[start + 1 : end]
    if name in ("begin", "end", "mathbb"):
        found.append(Token("command", f"{name} {inside.strip()}", spaced=spaced))
    elif "{" in inside or ("\\" in inside and inside.strip(" \\,;:")):
        raise Unknown(f"\\{name} holds LaTeX")
    else:
        _text(found, inside, spaced, is_prose=name not in ("mathrm", "operatorname", "mathbf", "mathit", "rm", "bf"))
    return end + 1


_PLAIN_WORD = re.compile(r"[A-Za-z]+|[0-9]+|\S")


def _text(found: list[Token], inside: str, spaced: bool, *, is_prose: bool) -> None:
    """What `\\text{...}` holds: a unit, a connecting word, a number or prose."""
    inside = inside.replace("\\", "").strip()
    if not inside:
        return
    if inside in FUNCTIONS:
        found.append(Token("function", inside, spaced=spaced))
    elif len(inside) == 1 and inside.isalpha() and not (is_prose and found and found[-1].kind in ("number", "}")):
        found.append(Token("name", inside, spaced=spaced))
    else:
        for match in _PLAIN_WORD.finditer(inside):
            word = match.group()
            if word.isalpha():
                lowered = word.casefold()
                if lowered in ("and", "or"):
                    found.append(Token("sep", lowered, spaced=True))
                else:
                    found.append(Token("unit" if is_unit_name(word) else "word", word, spaced=True))
            elif word.isdigit():
                found.append(Token("number", word, Fraction(word), spaced=True))
            elif word in "/^*%-+=<>:":
                found.append(Token("op", word, spaced=True))
            elif word in ",;":
                found.append(Token("sep", word, spaced=True))
            elif word in "()[]":
                found.append(Token("open" if word in "([" else "close", word, spaced=True))
            else:
                raise NotRead(f"{word!r} means nothing in it")


def _is_product(word: str) -> bool:
    """Whether a run of letters is a product of symbols, such as `xy` or `ABC`, rather than a word."""
    return len(word) <= 3 and (word.islower() or word.isupper()) and not (len(word) == 3 and "e" in word)


def _before_product(word: str) -> tuple[str, ...]:
    """Kinds of token after which, with a space between, such a run is a word after all: `12 men`, but not `3 xy`."""
    return () if len(word) == 2 and set(word) <= USUAL_SYMBOLS else ("number", "name", "}")


def _words(found: list[Token], word: str, spaced: bool) -> None:
    """A run of plain letters: a function, a constant, a connecting word, a unit, a product of symbols, or prose."""
    lowered = word.casefold()
    if lowered in PROSE_WORDS:
        found.append(Token("word", word, spaced=spaced))
    elif word in FUNCTIONS or word in FUNCTION_ALIASES:
        found.append(Token("function", FUNCTION_ALIASES.get(word, word), spaced=spaced))
    elif lowered in ("and", "or"):
        found.append(Token("sep", lowered, spaced=True))
    elif lowered in ("infinity", "inf", "infty"):
        found.append(Token("name", "oo", spaced=spaced))
    elif word in ("pi", *GREEK_LETTERS) or (
        len(word) == 1 and not (found and found[-1].kind == "number" and spaced and is_unit_name(word))
    ):
        found.append(Token("name", word, spaced=spaced))
    elif (
        is_unit_name(word) and found and (found[-1].kind in ("number", "}", "close", "unit") or found[-1].text == "/")
    ):
        found.append(Token("unit", word, spaced=spaced))
    elif _is_product(word) and not (spaced and found and found[-1].kind in ("word", "unit", *_before_product(word))):
        found.extend(Token("name", letter, spaced=spaced and not i) for i, letter in enumerate(word))
    else:
        found.append(Token("word", word, spaced=spaced))
