"""The part of a response that is its answer: what follows the thinking, without special tokens at the end."""

from __future__ import annotations

from collections.abc import Sequence

THINK, THINK_END = "<think>", "</think>"


def final_part(response: str) -> str | None:
    """The text after the last `</think>`, or all of it without one; None when a thought is begun and not ended."""
    _, _, rest = response.rpartition(THINK_END)
    return None if THINK in rest else rest


def without_endings(response: str, endings: Sequence[str]) -> str:
    """The response without any of `endings`, and without white space, at its end; in linear time, however many there are."""
    end = len(response)
    while True:
        while end and response[end - 1].isspace():
            end -= 1
        ending = next((token for token in endings if response.endswith(token, 0, end)), None)
        if ending is None:
            return response[:end]
        end -= len(ending)
