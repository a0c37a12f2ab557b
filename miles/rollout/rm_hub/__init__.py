"""Rewards: one table of built-in graders, and the hub that applies them or a user's function.

A new built-in grader is a class like those of `graders.py` and one line of `REWARDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from miles.core.samples import Group, Sample
from miles.errors import ConfigError, DataError, HookError, Issue
from miles.rollout.rm_hub.custom import CustomReward, checked_reward
from miles.rollout.rm_hub.graders import ExactGrader, Grader, LabelError, MathGrader
from miles.utils.async_utils import gather_or_cancel
from miles.utils.hf import special_token_texts
from miles.utils.waits import OPEN

REWARDS: dict[str, Callable[[float, int], Grader]] = {
    "math": MathGrader,
    "exact": ExactGrader,
}
"""Name of `--rm-type` -> grader, made with (seconds per call, worker processes)."""


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
        self._graders: dict[str, Grader] = {}
        self._end_tokens: list[str] | None = None

    async def grade(self, sample: Sample) -> float | dict[str, Any]:
        """Set `sample.reward` and return it.

        Raises HookError when the custom function raises, takes too long or returns no usable number; DataError for a
        label that cannot be graded against; ConfigError when the run names no reward.
        """
        name = _name(sample)
        if self._custom is not None:
            with OPEN.on(self._custom.path, "reward", group=sample.group_index, sample=sample.index):
                found = await self._custom.call(self.args, sample, name)
            reward = self._checked(found, name)
        else:
            reward = await self._grade_built_in(sample, name)
        sample.reward = reward
        return reward

    async def grade_group(self, group: Group) -> list[float | dict[str, Any]]:
        """Set and return the rewards of a group; with `--group-rm` the custom function gets the group at once.

        Raises as `grade` does, and HookError when a group function returns another number of rewards than samples.
        """
        if self._custom is None or not self.args.group_rm:
            return await gather_or_cancel([self.grade(sample) for sample in group])
        name = f"group {group[0].group_index} (samples {group[0].index} to {group[-1].index})"
        with OPEN.on(self._custom.path, "rewards of a group", group=group[0].group_index):
            rewards = await self._custom.call(self.args, group, name)
        if not hasattr(rewards, "__len__") or isinstance(rewards, str | bytes | dict):
            raise HookError(
                self._custom.path, f"returned {type(rewards).__name__} on {name}", "return one reward per sample"
            )
        if len(rewards) != len(group):
            raise HookError(
                self._custom.path,
                f"returned {len(rewards)} rewards for the {len(group)} samples of {name}",
                "return one reward per sample, in their order",
            )
        checked = [self._checked(reward, _name(sample)) for reward, sample in zip(rewards, group, strict=True)]
        for sample, reward in zip(group, checked, strict=True):
            sample.reward = reward
        return checked

    def metrics(self) -> dict[str, float]:
        """Counts since the start: calls that took too long, answers that ended a worker, labels that cannot be read."""
        totals = {"rollout/reward_timeouts": float(self._custom.num_timeouts if self._custom else 0)}
        for grader in self._graders.values():
            for key, value in grader.metrics().items():
                totals[key] = totals.get(key, 0.0) + value
        return totals

    async def close(self) -> None:
        """End every worker process."""
        for grader in self._graders.values():
            await asyncio.to_thread(grader.close)

    async def _grade_built_in(self, sample: Sample, name: str) -> float:
        rm_type = sample.metadata.get("rm_type") or self.args.rm_type
        grader = self._grader(rm_type, name)
        try:
            with OPEN.on(f"--rm-type {rm_type}", "reward", group=sample.group_index, sample=sample.index):
                return await grader.grade(self._without_end_tokens(sample.response), sample.label)
        except LabelError as error:
            raise DataError(
                f"--rm-type {rm_type}",
                f"{name}: {error}",
                "mend or remove the row, name another key with --label-key, or take another --rm-type",
            ) from error

    def _grader(self, rm_type: str | None, name: str) -> Grader:
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
        if rm_type not in REWARDS:
            raise DataError(
                f"--rm-type {rm_type}",
                f"{name}: there is no such built-in reward",
                f"the built-in rewards are {', '.join(REWARDS)}",
            )
        if rm_type not in self._graders:
            self._graders[rm_type] = REWARDS[rm_type](self.args.reward_timeout_s, self.args.reward_num_workers)
        return self._graders[rm_type]

    def _without_end_tokens(self, response: str) -> str:
        """The response without special tokens at its end, which `--rollout-skip-special-tokens` may have left there."""
        if self._end_tokens is None:
            self._end_tokens = special_token_texts(self.args.hf_checkpoint)
        response = response.rstrip()
        while ending := next((token for token in self._end_tokens if response.endswith(token)), None):
            response = response[: -len(ending)].rstrip()
        return response

    def _checked(self, value: Any, name: str) -> float | dict[str, Any]:
        assert self._custom is not None
        try:
            return checked_reward(value, self._keys)
        except ValueError as error:
            raise HookError(self._custom.path, f"on {name}: {error}") from error


def _name(sample: Sample) -> str:
    return f"sample {sample.index} (group {sample.group_index})"


__all__ = ["REWARDS", "Grader", "RewardHub"]
