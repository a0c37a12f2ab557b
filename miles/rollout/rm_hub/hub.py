"""The hub that gives samples their rewards, and the table of built-in graders.

A new built-in grader is a class like those of `graders.py`, one line of `REWARDS`, and its name in
`miles.config.reward_types`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from miles.config.reward_types import known_reward_types, split_boxed
from miles.core.samples import Group, Sample
from miles.errors import ConfigError, DataError, HookError, Issue
from miles.rollout.rm_hub.code_reward import CodeGrader
from miles.rollout.rm_hub.custom import CustomReward, checked_reward
from miles.rollout.rm_hub.f1 import F1Grader
from miles.rollout.rm_hub.final_part import without_endings
from miles.rollout.rm_hub.gpqa import GpqaGrader
from miles.rollout.rm_hub.graders import ExactGrader, Grader, LabelError, SampleGrader
from miles.rollout.rm_hub.ifbench import InstructionGrader
from miles.rollout.rm_hub.math_rewards import DapoGrader, DeepscalerGrader, GemmaMathGrader, MathGrader
from miles.rollout.rm_hub.math_text import last_boxed
from miles.rollout.rm_hub.random_rewards import DeterministicRandom, Random
from miles.rollout.rm_hub.remote import RemoteReward
from miles.rollout.rm_hub.reward_errors import RewardErrors
from miles.utils.async_utils import gather_or_cancel
from miles.utils.hf import special_token_texts
from miles.utils.waits import OPEN

REWARDS: dict[str, Callable[[Any], Grader | SampleGrader]] = {
    "math": lambda args: MathGrader(args.reward_timeout_s, args.reward_num_workers),
    "dapo": lambda args: DapoGrader(),
    "deepscaler": lambda args: DeepscalerGrader(args.reward_timeout_s, args.reward_num_workers),
    "gemma_math": lambda args: GemmaMathGrader(args.reward_timeout_s, args.reward_num_workers),
    "exact": lambda args: ExactGrader(),
    "f1": lambda args: F1Grader(),
    "gpqa": lambda args: GpqaGrader(),
    "remote_rm": lambda args: RemoteReward(
        args.rm_url, args.reward_timeout_s, args.reward_remote_max_in_flight, args.reward_remote_send_metadata
    ),
    "code": lambda args: CodeGrader(
        sample_s=args.reward_timeout_s,
        num_workers=args.reward_num_workers,
        time_s=args.reward_code_time_s,
        memory_bytes=args.reward_code_memory_mb << 20,
        partial_credit=args.reward_code_partial_credit,
    ),
    "ifbench": lambda args: InstructionGrader(args.reward_timeout_s, args.reward_num_workers),
    "random": lambda args: Random(),
    "deterministic_random": lambda args: DeterministicRandom(),
}
"""Name of `--rm-type` -> its grader, made from the run's `args`. `miles.config.reward_types` has the same names."""
READS_BOX = frozenset({"math", "dapo", "deepscaler", "gemma_math"})
r"""Rewards that look for the last `\boxed{}` themselves: of a `boxed_` one they get the box, the others its content."""


class RewardHub:
    """Gives samples their reward.

    `--custom-rm-path` wins over `--rm-type`, and `metadata["rm_type"]` of a row over the latter. An error is raised and
    never becomes a reward; the one exception is an answer that a built-in grader cannot judge within the limit, which
    is wrong and counted.

    Raises HookError when the custom path does not import.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self._keys = tuple(dict.fromkeys(key for key in (args.reward_key, args.eval_reward_key) if key is not None))
        path = args.custom_rm_path
        self._custom = None if path is None else CustomReward(path, args.reward_timeout_s)
        self._graders: dict[str, Grader | SampleGrader] = {}
        self._end_tokens: list[str] | None = None
        self._errors = RewardErrors(args.max_reward_error_rate)

    def step(self, num_samples: int) -> AbstractContextManager[None]:
        """While a step of `num_samples` rewards or more is collected: too many errors raise TrainingError."""
        return self._errors.step(num_samples)

    async def grade(self, sample: Sample) -> float | dict[str, Any]:
        """Set `sample.reward` and return it.

        Raises HookError when the custom function raises, takes too long or returns no usable number; DataError for a
        label that cannot be graded against; ConfigError when the run names no reward.
        """
        with self._counted([sample]):
            sample.reward = await self._grade(sample)
        return sample.reward

    async def _grade(self, sample: Sample) -> float | dict[str, Any]:
        name = _name(sample)
        if self._custom is not None:
            with OPEN.on(self._custom.path, "reward", group=sample.group_index, sample=sample.index):
                found = await self._custom.call(self.args, sample, name)
            return self._checked(found, name, self._custom.path)
        return await self._grade_built_in(sample, name)

    async def grade_group(self, group: Group) -> list[float | dict[str, Any]]:
        """Set and return the rewards of a group; with `--group-rm` the custom function gets the group at once.

        Raises as `grade` does, and HookError when a group function returns another number of rewards than samples.
        """
        if self._custom is None or not self.args.group_rm:
            return await gather_or_cancel([self.grade(sample) for sample in group])
        with self._counted(group):
            rewards = await self._grade_at_once(group, self._custom)
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = reward
        return rewards

    async def _grade_at_once(self, group: Group, custom: CustomReward) -> list[float | dict[str, Any]]:
        name = f"group {group[0].group_index} (samples {group[0].index} to {group[-1].index})"
        with OPEN.on(custom.path, "rewards of a group", group=group[0].group_index):
            rewards = await custom.call(self.args, group, name)
        if not hasattr(rewards, "__len__") or isinstance(rewards, str | bytes | dict):
            raise HookError(
                custom.path, f"returned {type(rewards).__name__} on {name}", "return one reward per sample"
            )
        if len(rewards) != len(group):
            raise HookError(
                custom.path,
                f"returned {len(rewards)} rewards for the {len(group)} samples of {name}",
                "return one reward per sample, in their order",
            )
        return [
            self._checked(reward, _name(sample), custom.path) for reward, sample in zip(rewards, group, strict=True)
        ]

    @contextmanager
    def _counted(self, samples: Group) -> Iterator[None]:
        """Count the calls and their errors; see `step`."""
        self._errors.note_calls(len(samples))
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            self._errors.note(samples, error)
            raise

    def metrics(self) -> dict[str, float]:
        """Counts since the start: calls that took too long, answers that ended a worker, labels that cannot be read."""
        totals = {"rollout/reward_timeouts": float(self._custom.num_timeouts if self._custom else 0)}
        for grader in self._graders.values():
            for key, value in grader.metrics().items():
                totals[key] = totals.get(key, 0.0) + value
        return totals | self._errors.metrics()

    async def close(self) -> None:
        """End every worker process, and the event loop of a custom function."""
        if self._custom is not None:
            await self._custom.close()
        for grader in self._graders.values():
            await asyncio.to_thread(grader.close)

    async def _grade_built_in(self, sample: Sample, name: str) -> float | dict[str, Any]:
        rm_type = sample.metadata.get("rm_type") or self.args.rm_type
        grader = self._grader(rm_type, name)
        try:
            with OPEN.on(f"--rm-type {rm_type}", "reward", group=sample.group_index, sample=sample.index):
                response = _judged_part(rm_type, self._without_end_tokens(sample.response))
                if isinstance(grader, SampleGrader):
                    reward = await grader.grade_sample(response, sample)
                else:
                    reward = await grader.grade(response, sample.label)
        except LabelError as error:
            raise DataError(
                f"--rm-type {rm_type}",
                f"{name}: {error}",
                "mend or remove the row, name another key with --label-key, or take another --rm-type",
            ) from error
        return self._checked(reward, name, f"--rm-type {rm_type}")

    def _grader(self, rm_type: Any, name: str) -> Grader | SampleGrader:
        if rm_type is None:
            raise ConfigError(
                [
                    Issue(
                        "reward.rm_type",
                        f"{name} is to be rewarded and the run names no reward",
                        f"set --rm-type ({', '.join(REWARDS)}) or --custom-rm-path",
                    )
                ]
            )
        base = split_boxed(rm_type)[1] if isinstance(rm_type, str) else None
        if base not in REWARDS:
            raise DataError(
                f"--rm-type {rm_type}", f"{name}: there is no such built-in reward", known_reward_types(str(rm_type))
            )
        if base not in self._graders:
            self._graders[base] = REWARDS[base](self.args)
        return self._graders[base]

    def _without_end_tokens(self, response: str) -> str:
        """The response without special tokens at its end, which `--rollout-skip-special-tokens` may have left there."""
        if self._end_tokens is None:
            folder = self.args.hf_checkpoint
            self._end_tokens = special_token_texts(folder) if folder else []
        return without_endings(response, self._end_tokens)

    def _checked(self, value: Any, name: str, source: str) -> float | dict[str, Any]:
        """The reward that `source` gave; raises HookError when it is no number, or an object without the run's key."""
        try:
            return checked_reward(value, self._keys)
        except ValueError as error:
            raise HookError(source, f"on {name}: {error}") from error


def _judged_part(rm_type: str, response: str) -> str:
    """The response, or for a `boxed_` reward the content of its last box: empty where there is none."""
    boxed, base = split_boxed(rm_type)
    if not boxed:
        return response
    content = last_boxed(response)
    if content is None:
        return ""
    return rf"\boxed{{{content}}}" if base in READS_BOX else content.strip()


def _name(sample: Sample) -> str:
    return f"sample {sample.index} (group {sample.group_index})"
