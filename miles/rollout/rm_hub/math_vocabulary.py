"""The words, commands and signs of mathematical answers that the lexer knows."""

from __future__ import annotations

FUNCTIONS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log",
    "lg", "exp", "sqrt", "abs", "floor", "ceil", "min", "max", "gcd", "lcm",
])  # fmt: skip
FUNCTION_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "cbrt": "cbrt"}
GREEK_LETTERS = frozenset([
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota",
    "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi",
    "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega", "ell",
])  # fmt: skip
OPERATOR_COMMANDS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤", "leqslant": "≤",
    "ge": "≥", "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠", "neq": "≠", "in": "∈", "cup": "∪",
    "cap": "∩", "setminus": "∖", "backslash": "∖", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "colon": ":",
    "lor": "or", "vee": "or", "wedge": "and", "land": "and", "approx": "≈",
}  # fmt: skip
NAMED_SYMBOLS = {"pi": "pi", "infty": "oo", "emptyset": "∅", "varnothing": "∅", "imath": "i"}
BRACKET_COMMANDS = {
    "lfloor": ("open", "⌊"), "rfloor": ("close", "⌋"), "lceil": ("open", "⌈"), "rceil": ("close", "⌉"),
    "langle": ("open", "⟨"), "rangle": ("close", "⟩"), "lbrace": ("open", "S{"), "rbrace": ("close", "S}"),
}  # fmt: skip
DROPPED_COMMANDS = frozenset([
    "angle", "triangle", "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl",
    "biggr", "Biggl", "Biggr", "displaystyle", "textstyle", "limits", "nolimits", "quad", "qquad", "hspace",
    "mathstrut",
])  # fmt: skip
TEXT_COMMANDS = frozenset([
    "text", "textbf", "textrm", "textit", "textnormal", "mbox", "mathrm", "mathbf", "mathit", "mathsf", "rm",
    "bf", "operatorname",
])  # fmt: skip
STRUCTURE_COMMANDS = frozenset({"over", "frac", "binom", "sqrt", "begin", "end", "overline", "circ", "mathbb"})
USUAL_SYMBOLS = frozenset("abcdkmnpqrstuvxyzABC")
PROSE_WORDS = frozenset([
    "am", "pm", "yes", "no", "true", "false", "none", "even", "odd", "dne", "all", "is", "not", "the", "of",
    "to", "it", "if", "never", "always",
])  # fmt: skip
UNICODE_AS_LATEX = str.maketrans(
    {
        "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "±": "±", "∓": "∓", "≤": "≤", "≥": "≥",
        "≠": "≠", "∞": r"\infty ", "π": r"\pi ", "√": " sqrt ", "∪": "∪", "∈": "∈", "∅": r"\emptyset ", "°": r"^\circ ",
        "′": "'", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "∨": " or ", "ℝ": r"\mathbb{R}", "，": ",", "（": "(", "）": ")",
        "θ": r"\theta ", "∖": "∖", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "£": "", "€": "", "¥": "",
    }
)  # fmt: skip
