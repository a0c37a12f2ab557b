"""`Sample`: one response of a model to a prompt, from data row to trained tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

Message = dict[str, Any]


@dataclass(slots=True)
class Sample:
    """One response, filled in as it travels: data source, generation, reward, training.

    A group is `list[Sample]` of one prompt. Several samples may form one trajectory: they share `rollout_id` and
    weigh 1 together.
    """

    class Status(Enum):
        """How generation ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    """Number of the prompt group in the run; rises by one with each group issued."""
    index: int | None = None
    """Number of the sample in the run."""
    rollout_id: int | None = None
    """Trajectory that the sample belongs to; None stands for `index`."""
    prompt: str | list[Message] = ""
    """The prompt as the data source gave it: rendered text, or chat messages."""
    tokens: list[int] = field(default_factory=list[int])
    """Token ids of prompt and response, length T."""
    response: str = ""
    """Text of the response."""
    response_length: int = 0
    """Tokens of the response, R: the last R of `tokens`."""
    label: Any = None
    """What rewards compare with."""
    reward: float | dict[str, Any] | None = None
    """Result of the reward function; None until it ran."""
    loss_mask: list[int] | None = None
    """R entries, 1 where a response token is trained on; None trains on all."""
    rollout_log_probs: list[float] | None = None
    """R log-probabilities of the response tokens under the policy that sampled them."""
    version_spans: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """`(start, weight version)` pairs over the response: tokens from `start` on were sampled by that version."""
    remove_sample: bool = False
    """Give the sample weight 0 in the loss; it still counts in its group's statistics."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """The row's metadata object, and what hooks add to it."""
    train_metadata: dict[str, Any] | None = None
    """What a hook passes on to the trainer's hooks."""
    generate_function_path: str | None = None
    """Generate function of this sample, in place of the run's."""
    non_generation_time: float = 0.0
    """Seconds spent in tools and environments."""
    cached_tokens: int = 0
    """Prompt tokens that the engine took from its cache."""

    @property
    def weight_versions(self) -> list[str]:
        """The versions that sampled the response, in order."""
        return [version for _, version in self.version_spans]

    @property
    def oldest_weight_version(self) -> int | None:
        """Oldest numeric version among the response's trainable tokens; None when there is none."""
        mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
        ends = [start for start, _ in self.version_spans[1:]] + [self.response_length]
        used = [
            int(v)
            for (start, v), end in zip(self.version_spans, ends[: len(self.version_spans)], strict=True)
            if any(mask[start:end]) and v.isdigit()
        ]
        return min(used, default=None)

    @property
    def effective_response_length(self) -> int:
        """Trainable tokens of the response."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def prompt_text(self) -> str:
        """The prompt as text, whatever its form: itself, or chat messages as `role: text` lines.

        Of content in parts, only the text parts are taken.
        """
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{m.get('role', 'user')}: {_content_text(m.get('content'))}" for m in self.prompt)

    @property
    def trajectory(self) -> int | None:
        """`rollout_id`, or `index` where there is none."""
        return self.index if self.rollout_id is None else self.rollout_id

    def get_reward_value(self, reward_key: str | None) -> float:
        """The reward as a finite float.

        Raises ValueError when there is none, when it is an object and `reward_key` does not name a number in it, or
        when it is NaN or infinite.
        """
        return reward_value(self.reward, reward_key)

    def validate(self) -> None:
        """Check lengths and spans; raises ValueError naming the sample and the two numbers that disagree."""
        name = f"sample {self.index} (group {self.group_index})"
        if not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(
                f"{name}: response_length is {self.response_length} but there are {len(self.tokens)} tokens"
            )
        for what, values in (("loss_mask", self.loss_mask), ("rollout_log_probs", self.rollout_log_probs)):
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name}: {len(values)} entries of {what} but {self.response_length} response tokens")
        if self.loss_mask is not None and any(m not in (0, 1) for m in self.loss_mask):
            raise ValueError(f"{name}: loss_mask holds values other than 0 and 1")
        starts = [start for start, _ in self.version_spans]
        if starts and (starts[0] != 0 or starts != sorted(starts) or starts[-1] > self.response_length):
            raise ValueError(f"{name}: version_spans start at {starts}; they must rise from 0 within the response")

    def append_response(self, token_ids: list[int], log_probs: list[float], text: str, weight_version: str) -> None:
        """Add sampled tokens with one log-probability each, and note the weight version that sampled them.

        Raises ValueError when the two lists differ in length.
        """
        if len(token_ids) != len(log_probs):
            raise ValueError(
                f"{len(token_ids)} token ids but {len(log_probs)} log-probs; an engine returns one per token"
            )
        if not self.version_spans or self.version_spans[-1][1] != weight_version:
            self.version_spans.append((self.response_length, weight_version))
        self.tokens = self.tokens + token_ids
        self.rollout_log_probs = (self.rollout_log_probs or []) + log_probs
        if self.loss_mask is not None:
            self.loss_mask = self.loss_mask + [1] * len(token_ids)
        self.response += text
        self.response_length += len(token_ids)

    def reset_for_retry(self) -> None:
        """Forget everything generated, so that the prompt can be sampled anew."""
        if self.response_length:
            self.tokens = self.tokens[: -self.response_length]
        self.response, self.response_length = "", 0
        self.reward = self.loss_mask = self.rollout_log_probs = self.train_metadata = None
        self.version_spans = []
        self.remove_sample = False
        self.status = Sample.Status.PENDING
        self.non_generation_time, self.cached_tokens = 0.0, 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready object with every field."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["status"] = self.status.value
        data["version_spans"] = [list(span) for span in self.version_spans]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`; raises ValueError on a field that does not exist."""
        known = {f.name for f in dataclasses.fields(cls)}
        if extra := sorted(set(data) - known):
            raise ValueError(
                f"no such field of a sample: {', '.join(extra)}; the fields are {', '.join(sorted(known))}"
            )
        data = dict(data)
        if "status" in data:
            data["status"] = Sample.Status(data["status"])
        data["version_spans"] = [(int(s), str(v)) for s, v in data.get("version_spans", [])]
        return cls(**data)


Group = list[Sample]


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return "".join(str(p.get("text", "")) if isinstance(p, dict) else str(p) for p in parts)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return "" if content is None else str(content)


def reward_value(reward: Any, reward_key: str | None) -> float:
    """Turn what a reward function returned into a finite float; raises ValueError with what to set otherwise."""
    if isinstance(reward, dict):
        reward = cast("dict[Any, Any]", reward)
        if reward_key is None:
            raise ValueError(
                f"the reward is an object with keys {sorted(map(str, reward))}; name one with --reward-key"
            )
        if reward_key not in reward:
            raise ValueError(
                f"the reward object has no {reward_key!r}, only {sorted(map(str, reward))}; see --reward-key"
            )
        reward = reward[reward_key]
    if reward is None:
        raise ValueError("the reward is None; return a number")
    if isinstance(reward, str):
        raise ValueError(f"the reward is the text {reward!r}; return a number")
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise ValueError(f"the reward is {reward!r}, not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"the reward is {value}; return a finite number")
    return value
