"""The built-in rewards: text of a response and a label in, 1.0 or 0.0 out."""

from __future__ import annotations

from typing import Any, Protocol

from miles.rollout.rm_hub.math_text import last_boxed, quick_verdict
from miles.rollout.rm_hub.worker_pool import WorkerPool


class LabelError(ValueError):
    """The row's label cannot be graded against, whatever the response is."""


class Grader(Protocol):
    """A built-in reward. `response` comes without special tokens at its end."""

    async def grade(self, response: str, label: Any) -> float:
        """1.0 when right, 0.0 when wrong. Raises LabelError."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        ...

    def close(self) -> None:
        """End what the grader started."""
        ...


class MathGrader:
    r"""Whether the last `\boxed{}` of a response, or its final answer, is mathematically the label.

    Equal strings and plain numbers are settled here; everything else goes to a worker process with math-verify, gold
    first and prediction second. An answer that takes a worker longer than the limit is wrong and counted.
    """

    def __init__(self, timeout_s: float, num_workers: int) -> None:
        self._pool = WorkerPool("miles.rollout.rm_hub.math_grader.grade", size=num_workers, timeout_s=timeout_s)
        self._num_bad_labels = 0

    async def grade(self, response: str, label: Any) -> float:
        """1.0 or 0.0. Raises LabelError for a label that is missing, empty, or cannot be read as mathematics."""
        gold = label_text(label)
        answer = last_boxed(response)
        verdict = quick_verdict(response if answer is None else answer, last_boxed(gold) or gold)
        if verdict is not None:
            return float(verdict)
        result = (await self._pool.run(response, gold)).value
        if result is None:
            return 0.0
        if result["label_problem"] is not None:
            self._num_bad_labels += 1
            raise LabelError(result["label_problem"])
        return float(result["correct"])

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/reward_timeouts": float(self._pool.num_timeouts),
            "rollout/reward_crashes": float(self._pool.num_crashes),
            "rollout/reward_bad_labels": float(self._num_bad_labels),
        }

    def close(self) -> None:
        self._pool.close()


class ExactGrader:
    """Whether a response is the label, character for character, white space at either end aside."""

    def __init__(self, timeout_s: float, num_workers: int) -> None:
        del timeout_s, num_workers  # nothing here can hang

    async def grade(self, response: str, label: Any) -> float:
        """1.0 or 0.0. Raises LabelError for a label that is missing or empty."""
        return float(response.strip() == label_text(label))

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return


def label_text(label: Any) -> str:
    """A label as stripped text. Raises LabelError when there is none, or it is a list or an object."""
    if isinstance(label, list | dict):
        raise LabelError(f"the label is {type(label).__name__}, and a string or a number is wanted")
    text = "" if label is None else str(label).strip()
    if not text:
        raise LabelError("the row has no label" if label is None else "the label is empty")
    return text
