"""Walking through groups: flat samples, trajectories, and their rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from miles.core.samples import Sample
from miles.errors import HookError, TrainingError


def flatten(items: Any) -> Iterator[Sample]:
    """Every sample of a sample, a group, or nested lists of them, in order."""
    if isinstance(items, Sample):
        yield items
        return
    if not isinstance(items, list | tuple):
        raise HookError(
            "rollout",
            f"found a {type(items).__name__} where a Sample or a list of them belongs",
            "return Sample objects from the generate or rollout function",
        )
    for item in items:  # pyright: ignore[reportUnknownVariableType]
        yield from flatten(item)


def trajectories(group: Iterable[Any]) -> list[list[Sample]]:
    """Samples of a group by trajectory, in order of first appearance.

    Samples that share `rollout_id` form one trajectory, and so do the samples of one nested list.
    """
    found: dict[tuple[str, int], list[Sample]] = {}
    for position, item in enumerate(group):
        for sample in flatten(item):
            name = sample.trajectory if isinstance(item, Sample) else sample.rollout_id
            key = ("position", position) if name is None else ("name", name)
            found.setdefault(key, []).append(sample)
    return list(found.values())


def trajectory_rewards(group: Iterable[Any], reward_key: str | None) -> list[float | None]:
    """One reward per trajectory of a group; None for one that was not scored.

    Raises TrainingError when siblings disagree or a reward is not a finite number.
    """
    return [trajectory_reward(siblings, reward_key) for siblings in trajectories(group)]


def trajectory_reward(siblings: list[Sample], reward_key: str | None) -> float | None:
    """The reward that all samples of one trajectory share; raises TrainingError naming the samples otherwise.

    None, in the sample or under the key of its reward object, stands for a trajectory that was not scored.
    """
    values: list[float | None] = []
    for sample in siblings:
        if is_unscored(sample.reward, reward_key):
            values.append(None)
            continue
        try:
            values.append(sample.get_reward_value(reward_key))
        except ValueError as error:
            raise TrainingError(f"sample {sample.index} of group {sample.group_index}: {error}") from None
    if any(v != values[0] for v in values):
        raise TrainingError(
            f"samples {[s.index for s in siblings]} of group {siblings[0].group_index} form one trajectory but have "
            f"the rewards {values}; give every sample of a trajectory the same reward"
        )
    return values[0]


def is_unscored(reward: Any, reward_key: str | None) -> bool:
    """Whether a reward is None, or an object whose entry under `reward_key` is: nobody judged, so it is no 0."""
    if isinstance(reward, dict):
        return reward_key is not None and reward_key in reward and reward[reward_key] is None
    return reward is None


def excerpt(sample: Sample, limit: int = 160) -> str:
    """The start of a sample's prompt on one line, for messages."""
    text = " ".join(sample.prompt_text.split())
    return text if len(text) <= limit else text[:limit] + "..."
