r"""Which choice a response to a multiple-choice question settles on, or None where it does not say so plainly.

Three kinds of evidence; the first that is there decides:

1. a letter in the last `\boxed{}` or `<answer></answer>`; or the last statement such as "the answer is C" or "Answer: (C)";
2. the last statement in other words: "I choose C", "it must be C", "C is correct", "so D remains";
3. the last line, when it is nothing but a letter, perhaps with the text of its choice: "C", "(C)", "Option C", "C) 42".

A letter that is denied ("not B", "C is excluded", "I do not think the answer is C", "if the answer is C") is no evidence;
one of several ("A or B") decides for none of them; what begins as an error message, or only refuses, has no answer.

No rules read prose for certain. What remains: an answer in words that are not foreseen here is missed, and an intricate
denial may be taken for an answer. Both are rarer than what a first-letter or last-letter rule gets wrong.
"""

from __future__ import annotations

import re
from functools import lru_cache

from miles.rollout.rm_hub.math_text import last_boxed

_TAIL = 10_000
_CONTEXT = 80
"""Characters before and after a statement in which it may be denied."""

# ---- text

_SPACES = re.compile(r"[^\S\n]+")
_BREAK_AFTER_COLON = re.compile(r": ?\n[ \n]*")
_COMMANDS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boxed) ?\{")
_SAME = str.maketrans(
    dict.fromkeys("*_`$\\") | {"’": "'", "‘": "'", "“": '"', "”": '"', "（": "(", "）": ")", "：": ":"}
)

# ---- statements. Every repetition is bounded, so that a pattern takes constant time at each place of the text.

_OPEN, _CLOSE = r" ?[(\[{\"']{0,2} ?", r" ?[)\]}\"']{0,2}"
_IS = r"(?: ?(?:is|was|would be|should be|must be|has to be|remains|will be|=|:|->|→|-|–|—)){1,2}"
_OF_WHAT = r"(?: (?:to|for|of|in) (?:this|the)(?: \w{1,20}){0,3}?)?\)?"
_FILLER = (
    r"(?: ?\b(?:the|option|choice|letter|most|likely|probably|clearly|definitely|indeed|therefore|thus|simply|just"
    r"|correct|right|final|best|one|answer|that|is)\b ?:?){0,5}"
)
_ANSWER_IS = rf"\b(?:answer|choice|option|conclusion)\b{_OF_WHAT}{_IS}{_FILLER}"
_CHOOSE = (
    r"\b(?:choose|chose|pick|picked|select|selected|go with|going with|opt for|answer|leaves|leaves us with"
    r"|(?:it|this|that)(?: is|'s| must be| has to be| should be| would be))"
    r"(?:(?: the)? ?\b(?:option|choice|letter|answer))?"
)
_BEFORE_SUBJECT = (
    r"(?:^|[\n.;:,>] ?|\b(?:option|choice|answer|letter|so|thus|hence|therefore|that|only|and|but|then|because|since"
    r"|clearly) )"
)
_IS_CORRECT = (
    r"(?: (?:is|must be|has to be|seems|looks)(?: the| most| clearly| therefore){0,3} (?:correct|right|true|best|answer)\b"
    r"| remains\b)"
)
_THEREFORE = r"\b(?:so|thus|hence|therefore),?(?: the)?(?: option| choice| answer)?"
_NO_ARTICLE = (
    r"(?:(?<![AI])|(?! (?!(?:is|was|because|since|as|due|based|given|for|by|with|so|therefore|which|where|when|if|after"
    r"|from|has|corresponds|follows|matches|seems|appears|looks|would|will|must|should|can|could|remains|describes"
    r"|states|gives|not|and|or|but|best|cannot|does|did|violates|contradicts|fails)\b)[a-z']))"
)
"""After a capital A or I, which may be an article or a pronoun: not a word that goes on from one."""

# ---- what takes a statement back

_DENIED_AFTER = re.compile(
    r"[)\]}\"']{0,2}(?:,? (?:which|that) | ?)"
    r"(?:(?:is|was|are|can|could|would|must|may|does|did|has|have|be|been|also|clearly|therefore|now) ?){0,3}"
    r"(?:n't|not\b|cannot\b|never\b|wrong\b|incorrect|excluded|ruled out|eliminated|impossible|false\b|invalid|rejected"
    r"|violates|contradicts|fails|out of the question|\?)",
    re.IGNORECASE,
)
_DENIED_BEFORE = re.compile(
    r"(?:\bnot|n't|\b(?:is|was|does|do|did|has|could|would|should|ca|wo)nt|\bcannot|\bnever|\bunable|\bdoubt|\bwhether|\bif|\bsuppose|\bassum(?:e|ing)|\brefuse|\bunlikely"
    r"|\bwithout|\binstead of|\brather than|\bunlike|\bexcept|\bneither|\bnor|\bno)"
    r"(?: (?:the|that|this|a|an|any|to|say|think|believe|claim|conclude|give|provide|offer|choose|pick|select|see|why"
    r"|sure|certain|confident|know|tell|determine|case|true|clear|it|is|be|of|final|correct|you|me|us|your|with|as|how"
    r"|option|choice)){0,6} ?$",
    re.IGNORECASE,
)
_NEW_CLAUSE = re.compile(r"[.;!?\n,]|\b(?:but|so|hence|therefore|thus|then|and)\b", re.IGNORECASE)
_ERROR = re.compile(
    r"\W{0,20}(?:\w{0,30}Error|\w{0,30}Exception|Traceback|HTTP(?:/\d\.\d)?|Fatal|Warning|Request failed|Timed? ?out)\b"
    r" ?(?:[:(!]|\d|code\b|occurred\b|\w{1,20} (?:exceeded|failed)\b)",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\b(?:I|we)(?:'m| am| are)?(?: \w{1,12}){0,2}? ?(?:cannot|can't|can not|won't|will not|unable to|not able to|don't know"
    r"|do not know|decline to|refuse to)\b|\bas an AI\b|\b(?:I'm|I am) sorry\b",
    re.IGNORECASE,
)


def find_letter(text: str, letters: str) -> str | None:
    """The one of the capital `letters` that `text` settles on; None when there is none, or more than one.

    Reads the last 10,000 characters. Takes time linear in them, whatever they are.
    """
    if is_error(text):
        return None
    text = text[-_TAIL:]
    for marked in (last_boxed(text), _in_answer_tags(text)):
        if marked is not None and (letter := _lone_letter(_plain(marked), letters)):
            return letter
    text = _plain(text)
    rules = _rules(letters)
    if (found := _last_statement(rules.answer, text, letters)) is not None:
        return found or None
    if is_refusal(text):
        return None
    if (found := _last_statement(rules.other, text, letters)) is not None:
        return found or None
    return _lone_letter(text.rstrip().rpartition("\n")[2], letters)


def is_error(text: str) -> bool:
    """Whether a response begins as an error message."""
    return _ERROR.match(_plain(text.lstrip()[:400])) is not None


def is_refusal(text: str) -> bool:
    """Whether a response says near its end that it cannot, will not or does not know."""
    return _REFUSAL.search(text[-_TAIL:]) is not None


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether what stands at `text[start:end]` is taken back by the words around it."""
    before = _NEW_CLAUSE.split(text[max(0, start - _CONTEXT) : start])[-1]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(text[end : end + _CONTEXT]))


class _Rules:
    """The patterns for a set of letters. The group that took part in a match holds the letter."""

    def __init__(self, letters: str) -> None:
        capital, small = re.escape(letters), re.escape(letters.lower())
        # A small letter counts where brackets or the end of the line set it apart, and "a" only after a colon there.
        in_brackets = rf" ?[(\[{{\"'] ?([{capital}{small}]) ?[)\]}}\"']"
        at_end = rf" ?((?![ai])[{small}]|(?<=[:=] )[{small}])(?=[.!]?(?: ?\n| ?$))"
        alone = rf"{_OPEN}([{capital}])(?![\w']){_NO_ARTICLE}"
        self.answer = re.compile(rf"(?i:{_ANSWER_IS})(?:{in_brackets}|{at_end}|{alone})")
        self.other = re.compile(
            rf"(?i:{_CHOOSE}){alone}"
            rf"|(?i:{_BEFORE_SUBJECT})[(\[]?([{capital}])[)\]]?(?={_IS_CORRECT})"
            rf"|(?i:{_THEREFORE}){_OPEN}([{capital}])(?={_CLOSE}[.!]? ?(?:\n|$))"
        )
        self.more = re.compile(
            rf"{_CLOSE},? ?(?:and/or|or|and|,|/|&|\+) ?(?:either |maybe |possibly |perhaps )?(?:option |choice )?"
            rf"[(\[]?([{capital}])(?![\w'])(?! (?:is|was|has|can|does|would|will|must)\b)"
        )
        self.lone = re.compile(
            rf"(?i:(?:final |correct |best )?(?:option|choice|letter|answer) ?)?:?{_OPEN}([{capital}]){_CLOSE}"
            r"(?:[.!]?|(?:[:]| -| –) ?\S.{0,200}|(?<=\)) ?\S.{0,200}|\. [A-Z0-9].{0,200})"
        )


@lru_cache(maxsize=64)
def _rules(letters: str) -> _Rules:
    return _Rules(letters)


def _plain(text: str) -> str:
    """Without Markdown's marks, dollar signs, backslashes and text commands; one space where there were several."""
    text = _COMMANDS.sub("(", text.replace("\r", "\n")).translate(_SAME)
    return _BREAK_AFTER_COLON.sub(": ", _SPACES.sub(" ", text))


def _in_answer_tags(text: str) -> str | None:
    before, found, _ = text.rpartition("</answer>")
    _, begun, inner = before.rpartition("<answer>")
    return inner if found and begun else None


def _last_statement(rule: re.Pattern[str], text: str, letters: str) -> str | None:
    """The letter of the last statement that is not denied; empty when it names several; None without a statement."""
    found: str | None = None
    for match in rule.finditer(text):
        group = match.lastindex or 0
        if is_denied(text, match.start(), match.end(group)):
            continue
        letter = match[group].upper()
        more = _rules(letters).more.match(text, match.end(group))
        found = "" if more and more[1] != letter else letter
    return found


def _lone_letter(line: str, letters: str) -> str | None:
    """The letter that a line is, or begins with before its choice's text; None for anything else."""
    line = line.strip()
    match = _rules(letters).lone.fullmatch(line) if len(line) <= 300 else None
    return match[1] if match else None
