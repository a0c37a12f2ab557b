"""The mathematical rewards: `math`, `deepscaler`, `gemma_math` and `dapo`."""

from __future__ import annotations

import re
from typing import Any

from miles.rollout.rm_hub.graders import LabelError, NothingToEnd, label_text
from miles.rollout.rm_hub.math_judge import answer_of, gold_of, is_closed_number, judge
from miles.rollout.rm_hub.math_text import last_boxed, without_emphasis
from miles.rollout.rm_hub.worker_pool import WorkerPool

LIMIT_S = 2.0
"""Seconds of a worker that one verdict may take, however long `reward.timeout_s` is."""

_DAPO_TAIL = 300
_ANSWER_LINE = re.compile(r"answer\s*:\s*(?P<answer>[^\n]+)", re.IGNORECASE)


class MathGrader:
    r"""Whether the last `\boxed{}` of a response, or else its final answer, is mathematically the label.

    Own exact arithmetic settles nearly all verdicts here, in bounded time. What it cannot read goes to a worker process
    with math-verify, gold first and answer second; one that takes a worker longer than LIMIT_S is wrong and counted.
    """

    def __init__(self, timeout_s: float, num_workers: int) -> None:
        self._pool = WorkerPool(
            "miles.rollout.rm_hub.math_grader.grade", size=num_workers, timeout_s=min(timeout_s, LIMIT_S)
        )
        self._num_bad_labels = 0

    async def grade(self, response: str, label: Any) -> float:
        """1.0 or 0.0. Raises LabelError for a label that is missing, empty, or cannot be read as mathematics."""
        gold = gold_of(label_text(label))
        if not gold:
            raise LabelError("the label is an empty box")
        answer = self._answer(response)
        if answer is None:
            return 0.0
        verdict = judge(answer, gold)
        if verdict is not None:
            return float(verdict)
        result = (await self._pool.run(answer, gold)).value
        if result is None:
            return 0.0
        if result["label_problem"] is not None:
            self._num_bad_labels += 1
            raise LabelError(result["label_problem"])
        return float(result["correct"])

    def _answer(self, response: str) -> str | None:
        return answer_of(response)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/reward_timeouts": float(self._pool.num_timeouts),
            "rollout/reward_crashes": float(self._pool.num_crashes),
            "rollout/reward_bad_labels": float(self._num_bad_labels),
        }

    def close(self) -> None:
        self._pool.close()


class _AfterMarker(MathGrader):
    """Judges the last box of what follows the last of `ends`, or of the whole response where there is none."""

    ends: tuple[str, ...]
    start: str

    def _answer(self, response: str) -> str | None:
        """None when the part has no box, or thinks on: a thought that is cut off holds no answer."""
        part = response[max((response.rfind(end) + len(end) for end in self.ends if end in response), default=0) :]
        return None if self.start in part else last_boxed(part)


class DeepscalerGrader(_AfterMarker):
    r"""`math` on the last `\boxed{}` after the last `</think>` or `###Response`; 0 while `<think>` is open."""

    ends = ("</think>", "###Response")
    start = "<think>"


class GemmaMathGrader(_AfterMarker):
    r"""`math` on the last `\boxed{}` after the last `<channel|>`; 0 while `<|channel>` is open."""

    ends = ("<channel|>",)
    start = "<|channel>"


class DapoGrader(NothingToEnd):
    r"""The line `Answer: ...` at the end of a response against a number: `{"score": ±1.0, "acc": 0 or 1, "pred": text}`.

    Only the last 300 characters count. A response that is nothing but a box is its own answer: what `boxed_dapo` makes.
    """

    async def grade(self, response: str, label: Any) -> dict[str, Any]:
        """Score, accuracy and what was read as the answer. Raises LabelError for a label that is no number."""
        gold = label_text(label)
        if (problem := number_problem(gold)) is not None:
            raise LabelError(problem)
        pred = _dapo_answer(response)
        correct = pred is not None and judge(pred, gold_of(gold)) is True
        return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": pred}


def number_problem(label: str) -> str | None:
    """What is wrong with a label that must be one number; None when nothing is."""
    if is_closed_number(gold_of(label)):
        return None
    return f"the label {label!r:.200} is not a number"


def _dapo_answer(response: str) -> str | None:
    content = last_boxed(response)
    if content is not None and response.strip() == rf"\boxed{{{content}}}":
        return content.strip()
    lines = _ANSWER_LINE.findall(without_emphasis(response[-_DAPO_TAIL:]))
    if not lines:
        return None
    line = lines[-1].strip().removesuffix("**").strip()
    box = last_boxed(line)
    return line if box is None else box.strip()
