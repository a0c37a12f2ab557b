"""Overlap of words between a response and the gold answer, as SQuAD scores it (Rajpurkar et al., arXiv:1606.05250)."""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from typing import Any

from miles.rollout.rm_hub.final_part import final_part
from miles.rollout.rm_hub.graders import NothingToEnd, label_text

_ARTICLES = frozenset({"a", "an", "the"})
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})


class F1Grader(NothingToEnd):
    """F1 of the words of a response against the label, or the best over a list of labels; in [0, 1].

    What a model thinks before its last `</think>` is not judged.
    """

    async def grade(self, response: str, label: Any) -> float:
        """Raises LabelError for a label that is missing or empty, or a list that holds such a one."""
        texts = gold_texts(label)
        answer = final_part(response)
        return 0.0 if answer is None else max(f1_score(answer, gold) for gold in texts)


def gold_texts(label: Any) -> list[str]:
    """The gold answers that a label holds: one, or a list of them. Raises LabelError when one is missing or empty."""
    return [label_text(gold) for gold in (label if isinstance(label, list) and label else [label])]


def f1_score(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words after `normalize`, with multiplicity; 0.0 when either has none.

    Where one of the two is `yes`, `no` or `noanswer`, the other must be the same.
    """
    answer, gold = normalize(answer), normalize(gold)
    if answer != gold and (answer in _WHOLE_ANSWERS or gold in _WHOLE_ANSWERS):
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    common = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * common / (len(answer_words) + len(gold_words)) if common else 0.0


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, words one space apart; articles stay when there is nothing else."""
    words = text.lower().translate(_PUNCTUATION).split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


class _Punctuation(dict[int, int | None]):
    """A table for `str.translate` that drops ASCII's and Unicode's punctuation, and is filled as characters come."""

    def __missing__(self, code: int) -> int | None:
        char = chr(code)
        drop = char in string.punctuation or unicodedata.category(char).startswith("P")
        self[code] = None if drop else code
        return self[code]


_PUNCTUATION = _Punctuation()
