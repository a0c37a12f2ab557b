r"""One scalar expression from tokens: numbers, symbols, `+ - * / ^ !`, roots, fractions, binomials, common functions.

A node is a tuple whose first entry says what it is: `("num", Fraction)`, `("sym", name)`, `("const", "pi" | "e" | "i" |
"oo")`, `("add", a, b)`, `("neg", a)`, `("mul", a, b)`, `("div", a, b)`, `("pow", a, b)`, `("root", n, a)`,
`("log", base, a)`, `("fn", name, a)`, `("fact", a)`, `("binom", n, k)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from miles.rollout.rm_hub.math_lexer import NotRead, Token, Unknown

Node = tuple[Any, ...]
ONE: Node = ("num", Fraction(1))
_DEGREE: Node = ("div", ("const", "pi"), ("num", Fraction(180)))
_CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "oo": "oo"}
_CLOSING = {"(": ")", "[": "]", "⌊": "⌋", "⌈": "⌉"}
_OPAQUE_WITH_PARENTHESES = frozenset("fghFGHP")
_MANY_ARGUMENTS = frozenset({"min", "max", "gcd", "lcm"})
_MAX_DEPTH = 60
_END = Token("op", "")


def parse_scalar(tokens: Sequence[Token]) -> Node:
    """The expression that all of `tokens` write. Raises NotRead, or Unknown where a larger reader may do better."""
    parser = _Parser(tokens)
    node = parser.sum()
    if parser.next is not _END:
        raise NotRead(f"{parser.next.text!r} is not expected there")
    return node


def symbols_of(node: Node) -> frozenset[str]:
    """Names of the free symbols of a node."""
    if node[0] == "sym":
        return frozenset((node[1],))
    found: frozenset[str] = frozenset()
    for part in node[1:]:
        if isinstance(part, tuple):
            found |= symbols_of(part)
    return found


def _is_proper(fraction: Node) -> bool:
    """Whether a fraction is one of digits and below 1, as in a mixed number."""
    top, bottom = fraction[1], fraction[2]
    if top[0] != "num" or bottom[0] != "num":
        return False
    return top[1].denominator == bottom[1].denominator == 1 and 0 < top[1] < bottom[1]


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._depth = 0
        self._tokens = list(tokens)
        self._at = 0
        self._bars = 0
        self._in_function = 0

    @property
    def next(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def _after(self, steps: int = 1) -> Token:
        return self._tokens[self._at + steps] if self._at + steps < len(self._tokens) else _END

    def _take(self) -> Token:
        token = self.next
        if token is _END:
            raise NotRead("it ends too early")
        self._at += 1
        return token

    def _is(self, kind: str, text: str) -> bool:
        return self.next.kind == kind and self.next.text == text

    def _expect(self, kind: str, text: str) -> None:
        token = self._take()
        if token.kind != kind or token.text != text:
            raise NotRead(f"{text!r} is missing")

    def sum(self) -> Node:
        node = self._product()
        while self.next.kind == "op" and self.next.text in ("+", "-"):
            sign = self._take().text
            term = self._product()
            node = ("add", node, term if sign == "+" else ("neg", term))
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            if self.next.kind == "op" and self.next.text in ("*", "/"):
                sign = self._take().text
                node = ("mul" if sign == "*" else "div", node, self._signed())
            elif self._starts_atom():
                if self.next.kind == "number":
                    raise NotRead("two numbers stand side by side")
                node = ("mul", node, self._power())
            else:
                return node

    def _signed(self) -> Node:
        negative = False
        while self.next.kind == "op" and self.next.text in ("+", "-"):
            negative ^= self._take().text == "-"
        node = self._power()
        return ("neg", node) if negative else node

    def _starts_atom(self) -> bool:
        token = self.next
        if token.kind == "op":
            return token.text == "|" and not self._bars
        return token.kind in ("number", "name", "function", "{") or (
            (token.kind == "open" and token.text in _CLOSING)
            or (token.kind == "command" and token.text in ("frac", "sqrt", "binom"))
        )

    def _power(self) -> Node:
        node = self._postfix(self._atom())
        if self._is("op", "^"):
            self._at += 1
            node = ("pow", node, self._script())
            node = self._postfix(node)
        return node

    def _postfix(self, node: Node) -> Node:
        while self._is("op", "!"):
            self._at += 1
            if self._is("op", "!"):
                raise Unknown("it has a double factorial")
            node = ("fact", node)
        if self.next.kind == "unit" and self.next.text == "degree" and self._in_function:
            self._at += 1
            node = ("mul", node, _DEGREE)
        return node

    def _script(self) -> Node:
        """What follows `^`: a group, a signed number or one atom, and what follows a `^` behind it."""
        negative = False
        while self.next.kind == "op" and self.next.text in ("+", "-"):
            negative ^= self._take().text == "-"
        node = self._atom()
        if self._is("op", "^"):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise NotRead("it is nested too deeply")
            self._at += 1
            node = ("pow", node, self._script())
            self._depth -= 1
        return ("neg", node) if negative else node

    def _group(self) -> Node:
        self._expect("{", "{")
        bars, self._bars = self._bars, 0
        node = self.sum()
        if self._is("command", "over"):
            self._at += 1
            node = ("div", node, self.sum())
        self._bars = bars
        self._expect("}", "}")
        return node

    def _argument(self) -> Node:
        """An argument of a LaTeX command: a group, or one digit, letter or command."""
        if self.next.kind == "{":
            return self._group()
        token = self.next
        if token.kind == "number":
            digit = token.text[0]
            if not digit.isdigit():
                raise NotRead("an argument is missing")
            rest = token.text[1:]
            if rest:
                self._tokens[self._at] = replace(token, text=rest, value=Fraction(rest), spaced=False)
            else:
                self._at += 1
            return ("num", Fraction(digit))
        return self._atom()

    def _atom(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotRead("it is nested too deeply")
        node = self._atom_itself()
        self._depth -= 1
        return node

    def _atom_itself(self) -> Node:
        token = self._take()
        if token.kind == "number":
            return self._number(token)
        if token.kind == "name":
            return self._name(token.text)
        if token.kind == "function":
            return self._function(token.text)
        if token.kind == "command":
            return self._command(token.text)
        if token.kind == "{":
            self._at -= 1
            return self._group()
        if token.kind == "open" and token.text in _CLOSING:
            return self._bracket(token.text)
        if token.kind == "op" and token.text == "|":
            self._bars += 1
            node = self.sum()
            self._bars -= 1
            self._expect("op", "|")
            return ("fn", "abs", node)
        raise NotRead(f"{token.text!r} is not expected there")

    def _number(self, token: Token) -> Node:
        """A number; `1\\frac{1}{2}` and `1 1/2` are mixed ones."""
        value: Node = ("num", token.value)
        if not token.text.isdigit():
            return value
        if self._is("command", "frac"):
            start, tokens = self._at, list(self._tokens)
            fraction = self._command(self._take().text)
            if _is_proper(fraction):
                return ("num", value[1] + fraction[1][1] / fraction[2][1])
            self._at, self._tokens = start, tokens
        elif self.next.kind == "number" and self.next.spaced and self._after().text == "/":
            top, bottom = self.next, self._after(2)
            if top.text.isdigit() and bottom.text.isdigit() and 0 < int(top.text) < int(bottom.text):
                self._at += 3
                return ("num", value[1] + Fraction(int(top.text), int(bottom.text)))
        return value

    def _name(self, name: str) -> Node:
        if self.next.kind == "op" and self.next.text == "'":
            raise Unknown("it has a derivative")
        if name in _OPAQUE_WITH_PARENTHESES and self._is("open", "("):
            raise Unknown("it has a function that is not defined")
        return ("const", _CONSTANTS[name]) if name in _CONSTANTS else ("sym", name)

    def _bracket(self, opening: str) -> Node:
        bars, self._bars = self._bars, 0
        node = self.sum()
        self._bars = bars
        self._expect("close", _CLOSING[opening])
        if opening in "⌊⌈":
            return ("fn", "floor" if opening == "⌊" else "ceil", node)
        return node

    def _command(self, name: str) -> Node:
        if name == "frac":
            return ("div", self._argument(), self._argument())
        if name == "binom":
            return ("binom", self._argument(), self._argument())
        if name == "sqrt":
            if not self._is("open", "["):
                return ("root", ("num", Fraction(2)), self._argument())
            self._at += 1
            degree = self.sum()
            self._expect("close", "]")
            return ("root", degree, self._argument())
        raise Unknown(f"\\{name} is not read there")

    def _function(self, name: str) -> Node:
        if name in _MANY_ARGUMENTS:
            raise Unknown(f"{name} takes several arguments")
        base = power = None
        for _ in range(2):
            if self._is("op", "^") and power is None:
                self._at += 1
                power = self._script()
            elif self._is("op", "_") and base is None and name == "log":
                self._at += 1
                base = self._script()
        self._in_function += 1
        argument = self._function_argument()
        self._in_function -= 1
        if name == "log":
            node: Node = ("log", base, argument)
        elif name in ("sqrt", "cbrt"):
            node = ("root", ("num", Fraction(2 if name == "sqrt" else 3)), argument)
        elif power == ("neg", ONE) and name in ("sin", "cos", "tan"):
            return ("fn", f"arc{name}", argument)
        else:
            node = ("pow", ("const", "e"), argument) if name == "exp" else ("fn", name, argument)
        return node if power is None else ("pow", node, power)

    def _function_argument(self) -> Node:
        """`\\sin 2x` is the sine of 2x; `\\sin(x) y` is a product."""
        if self.next.kind == "{" or (self.next.kind == "open" and self.next.text in "(["):
            return self._postfix(self._atom())
        node = self._signed()
        while self._starts_atom() and self.next.kind not in ("function", "open"):
            node = ("mul", node, self._power())
        return node
