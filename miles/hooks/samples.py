"""What a hook is tried on: samples as a run makes them, finished and with rewards, in groups of one prompt."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.samples import Sample
from miles.errors import DataError

VERSION = "3"
GROUP_SIZE = 4
_QUESTIONS = (("What is 17 + 25?", "42"), ("What is 6 * 7 - 2?", "40"), ("How many days have two weeks?", "14"))
_ANY_RUN = ("an empty response", "a long response, cut off", "text of other scripts")
_LONG = "and so on, " * 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One sample, and what is special about it."""

    name: str
    sample: Sample
    happens: bool = True
    """Whether every run makes such samples; otherwise a hook may refuse it, with an error that says why."""


def finish(sample: Sample, response: str, reward: float | None, *, cut: bool = False) -> Sample:
    """`sample` as generation and reward leave it; a character stands for a token."""
    prompt_ids = list(sample.tokens) or [ord(c) % 997 for c in sample.prompt_text] or [0]
    token_ids = [ord(c) % 997 for c in response] or [1]
    sample.tokens = prompt_ids
    sample.append_response(token_ids, [-0.25] * len(token_ids), response, VERSION)
    sample.status = Sample.Status.TRUNCATED if cut else Sample.Status.COMPLETED
    sample.reward = reward
    return sample


def answers_to(label: Any) -> list[tuple[str, str, bool, float]]:
    """Responses to one prompt: what is special, the text, whether it is cut off, and a reward for hooks that read one."""
    right = label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
    return [
        ("a right answer", right, False, 1.0),
        ("a right answer in words", f"Let me think. The answer is \\boxed{{{right}}}.", False, 1.0),
        ("a wrong answer", "I do not know.", False, 0.0),
        (_ANY_RUN[0], "", False, 0.0),
        (_ANY_RUN[1], _LONG, True, 0.0),
        (_ANY_RUN[2], "答え: ½ — \u2028 é 😀 \x00", False, 0.0),
    ]


def made_up_prompts(count: int) -> list[Sample]:
    """Prompts of sums with labels."""
    chosen = [_QUESTIONS[i % len(_QUESTIONS)] for i in range(count)]
    return [Sample(prompt=prompt, label=label, metadata={"source": "made up"}) for prompt, label in chosen]


def cases(prompts: Sequence[Sample]) -> list[Case]:
    """Every kind of response to the first prompt, a right answer to the others, and one without label and metadata."""
    found: list[Case] = []
    for number, prompt in enumerate(prompts):
        for name, text, cut, _ in answers_to(prompt.label)[: None if number == 0 else 1]:
            sample = finish(_like(prompt, number, len(found)), text, None, cut=cut)
            found.append(Case(name=name if number == 0 else f"{name} to prompt {number}", sample=sample))
    bare = Sample(group_index=len(prompts), index=len(found), prompt=prompts[0].prompt)
    found.append(Case(name="no label and no metadata", sample=finish(bare, "42", None), happens=False))
    return found


def groups(prompts: Sequence[Sample], reward_key: str | None = None) -> list[list[Sample]]:
    """A finished group for each prompt: the first with rewards of both kinds, the second all right, the rest all wrong."""
    made: list[list[Sample]] = []
    for number, prompt in enumerate(prompts):
        kinds = answers_to(prompt.label)
        chosen = (
            [kinds[0], kinds[2], kinds[1], kinds[4]] if number == 0 else [kinds[0 if number == 1 else 2]] * GROUP_SIZE
        )
        group = [
            finish(_like(prompt, number, number * GROUP_SIZE + i), text, reward, cut=cut)
            for i, (_, text, cut, reward) in enumerate(chosen)
        ]
        for sample in group:
            if reward_key is not None:
                sample.reward = {reward_key: sample.reward}
        made.append(group)
    return made


def _like(prompt: Sample, group: int, index: int) -> Sample:
    sample = copy.deepcopy(prompt)
    sample.group_index, sample.index = group, index
    return sample


def saved_groups(path: str) -> list[list[Any]]:
    """The groups of a file that `--save-debug-rollout-data` wrote; raises DataError for another one."""
    from miles.rollout.saved_samples import load_groups

    try:
        with Path(path).open(encoding="utf-8") as file:
            header = json.loads(file.readline())
        step = int(header["rollout_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is no file of saved samples: {type(error).__name__}: {error}"
        raise DataError(path, problem, "give --samples a file that --save-debug-rollout-data wrote") from error
    return load_groups(path, step)
