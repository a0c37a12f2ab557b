"""Labels that a built-in reward cannot grade against, found when data is loaded and not in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles.config.reward_types import split_boxed
from miles.rollout.rm_hub.f1 import gold_texts
from miles.rollout.rm_hub.graders import LabelError, label_text
from miles.rollout.rm_hub.math_judge import gold_of
from miles.rollout.rm_hub.math_lexer import NotRead
from miles.rollout.rm_hub.math_reader import read
from miles.rollout.rm_hub.math_rewards import number_problem
from miles.rollout.rm_hub.math_text import prose

_MATHS = frozenset({"math", "deepscaler", "gemma_math"})
_TEXTS = frozenset({*_MATHS, "dapo", "exact", "f1"})


def label_check(args: Any) -> Callable[[Any, Mapping[str, Any]], str | None] | None:
    """What finds labels that the run's built-in reward could not grade against; None when its own function judges."""
    if args.custom_rm_path is not None:
        return None

    def check(label: Any, metadata: Mapping[str, Any]) -> str | None:
        rm_type = metadata.get("rm_type") or args.rm_type
        return label_problem(rm_type, label) if isinstance(rm_type, str) else None

    return check


def label_problem(rm_type: str, label: Any) -> str | None:
    """What is wrong with a row's label for `--rm-type rm_type`; None when nothing is, or the reward has no rule.

    A mathematical label that takes more than this package's reader loads sympy and is read by it.
    """
    base = split_boxed(rm_type)[1]
    if base not in _TEXTS:
        return None
    try:
        text = ", ".join(gold_texts(label)) if base == "f1" else label_text(label)
    except LabelError as error:
        return str(error)
    if base == "dapo":
        return number_problem(text)
    return _maths_problem(gold_of(text)) if base in _MATHS else None


def _maths_problem(gold: str) -> str | None:
    if not gold:
        return "the label is an empty box"
    if prose(gold) is not None:
        return None
    try:
        read(gold)
    except NotRead:
        from miles.rollout.rm_hub.math_grader import parse_gold

        return parse_gold(gold)[1]
    return None
