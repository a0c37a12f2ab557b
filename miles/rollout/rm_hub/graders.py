"""What a built-in reward is, and the two simplest kinds: text of a response and a label in, 1.0 or 0.0 out."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from miles.core.samples import Sample


class LabelError(ValueError):
    """The row's label cannot be graded against, whatever the response is."""


class Grader(Protocol):
    """A built-in reward that compares with the label. `response` comes without special tokens at its end."""

    async def grade(self, response: str, label: Any) -> float | dict[str, Any]:
        """The reward, such as 1.0 when right and 0.0 when wrong. Raises LabelError."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        ...

    def close(self) -> None:
        """End what the grader started."""
        ...


@runtime_checkable
class SampleGrader(Protocol):
    """A built-in reward that needs more of the sample than its label: prompt, tokens or metadata."""

    async def grade_sample(self, response: str, sample: Sample) -> float | dict[str, Any]:
        """The reward; `response` is the part of `sample.response` that is to be judged. Raises LabelError."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        ...

    def close(self) -> None:
        """End what the grader started."""
        ...


class NothingToEnd:
    """Base of graders that start nothing and count nothing."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return


class ExactGrader(NothingToEnd):
    """Whether a response is the label, character for character, white space at either end aside."""

    async def grade(self, response: str, label: Any) -> float:
        """1.0 or 0.0. Raises LabelError for a label that is missing or empty."""
        return float(response.strip() == label_text(label))


def label_text(label: Any) -> str:
    """A label as stripped text. Raises LabelError when there is none, or it is NaN, a list or an object."""
    if isinstance(label, list | dict):
        raise LabelError(f"the label is {type(label).__name__}, and a string or a number is wanted")
    if isinstance(label, float) and math.isnan(label):
        raise LabelError("the label is NaN, as tables write a missing one")
    text = "" if label is None else str(label).strip()
    if not text:
        raise LabelError("the row has no label" if label is None else "the label is empty")
    return text
