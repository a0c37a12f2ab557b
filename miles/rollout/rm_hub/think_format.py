"""Whether a response keeps to the form `<think>...</think><answer>...</answer>`."""

from __future__ import annotations

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def has_think_answer_form(response: str) -> bool:
    """Whether each of the four tags is there once, in order, and outside of them is nothing but white space."""
    text = response.strip()
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    opening, thought_end, answer, answer_end = (text.index(tag) for tag in _TAGS)
    between = text[thought_end + len("</think>") : answer]
    return (
        opening == 0
        and opening < thought_end < answer < answer_end
        and not between.strip()
        and answer_end + len("</answer>") == len(text)
    )


def answer_of(response: str) -> str | None:
    """What stands between `<answer>` and `</answer>`, stripped; None when the response has another form."""
    if not has_think_answer_form(response):
        return None
    return response.partition("<answer>")[2].partition("</answer>")[0].strip()
