"""Text of a growing list of tokens, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Stands in decoded text for a character whose last bytes have not come yet."""


class StopMatcher:
    """Watches the text of one request for stop strings, decoding only its newest tokens.

    A few tokens are decoded again each time, because a token's text can depend on the one before it (spaces, bytes of
    a character that is not complete yet).
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._stops = stops
        self._decode = decode
        self._reach = max(len(stop) for stop in stops) - 1
        self._tail = ""
        self._context_start = 0
        self._new_start = 0
        self._context_text = ""

    def feed(self, output_ids: list[int]) -> str | None:
        """Look at the text that the last token added; returns the stop string that ends earliest, or None."""
        text = self._decode(output_ids[self._context_start :])
        if len(text) <= len(self._context_text) or text.endswith(INCOMPLETE):
            return None
        added = text[len(self._context_text) :]
        self._context_start, self._new_start = self._new_start, len(output_ids)
        self._context_text = self._decode(output_ids[self._context_start :])
        window = self._tail + added
        self._tail = window[-self._reach :] if self._reach else ""
        found = [(window.find(stop) + len(stop), stop) for stop in self._stops if stop in window]
        return min(found)[1] if found else None
