"""Labels that a built-in reward cannot grade against, found when data is loaded and not in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.config.reward_types import is_reward_type, known_reward_types, split_boxed
from miles.rollout.rm_hub.code_tests import read_tests
from miles.rollout.rm_hub.f1 import gold_texts
from miles.rollout.rm_hub.gpqa import Question
from miles.rollout.rm_hub.graders import LabelError, label_text
from miles.rollout.rm_hub.math_judge import gold_of
from miles.rollout.rm_hub.math_lexer import NotRead
from miles.rollout.rm_hub.math_reader import read
from miles.rollout.rm_hub.math_rewards import number_problem
from miles.rollout.rm_hub.math_text import prose

_MATHS = frozenset({"math", "deepscaler", "gemma_math"})


def label_check(args: Any) -> Callable[[Any, dict[str, Any]], str | None] | None:
    """What finds rows that the run's built-in reward could not grade against; None when its own function judges."""
    if args.custom_rm_path is not None:
        return None

    def check(label: Any, metadata: dict[str, Any]) -> str | None:
        rm_type = metadata.get("rm_type") or args.rm_type
        if rm_type is None:
            return None
        return reward_type_problem(rm_type) or label_problem(rm_type, label, metadata)

    return check


def reward_type_problem(rm_type: Any) -> str | None:
    """What is wrong with the name of a reward that a row gives; None when it is one."""
    if isinstance(rm_type, str) and is_reward_type(rm_type):
        return None
    return f"there is no built-in reward {rm_type!r:.80}: {known_reward_types(str(rm_type))}"


def label_problem(rm_type: str, label: Any, metadata: dict[str, Any] | None = None) -> str | None:
    """What is wrong with a row's label and metadata for `--rm-type rm_type`; None when nothing is, or there is no rule.

    A mathematical label that takes more than this package's reader loads sympy and is read by it.
    """
    base = split_boxed(rm_type)[1]
    try:
        if base == "f1":
            gold_texts(label)
        elif base == "code":
            read_tests(label, metadata or {})
        elif base == "gpqa":
            Question(label, metadata or {})
        elif base == "exact":
            label_text(label)
        elif base == "dapo":
            return number_problem(label_text(label))
        elif base in _MATHS:
            return _maths_problem(gold_of(label_text(label)))
    except LabelError as error:
        return str(error)
    return None


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
