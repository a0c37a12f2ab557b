"""The dynamic sampling filters that ship with Miles. Each counts a trajectory once, however many samples it became."""

# G trajectories of a group

from __future__ import annotations

from typing import Any

import numpy as np

from miles.core.samples import Sample
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.groups import flatten, trajectories, trajectory_rewards

SMALLEST_STD = 1e-8


def check_reward_nonzero_std(args: Any, group: Any, **_: Any) -> DynamicFilterOutput:
    """Keep a group whose trajectories have different rewards: one with equal rewards teaches nothing.

    Trajectories without a reward do not count; a group of nothing else is dropped as `unscored`. A group of one
    trajectory has no spread to judge and is kept; one of several, of which a single one was scored, is dropped as
    `one_scored`. Dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476).
    """
    rewards = trajectory_rewards(group, args.reward_key)
    scored_G = np.asarray([r for r in rewards if r is not None], dtype=np.float64)
    if not len(scored_G):
        return DynamicFilterOutput(keep=False, reason="unscored")
    if len(rewards) == 1:
        return DynamicFilterOutput(keep=True)
    if len(scored_G) == 1:
        return DynamicFilterOutput(keep=False, reason="one_scored")
    if float(scored_G.max()) != float(scored_G.min()) and float(scored_G.std(ddof=1)) > SMALLEST_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(float(scored_G[0]), 1)}")


def check_no_aborted(args: Any, group: Any, **_: Any) -> DynamicFilterOutput:
    """Keep a group that has no aborted sample."""
    if any(sample.status is Sample.Status.ABORTED for sample in flatten(group)):
        return DynamicFilterOutput(keep=False, reason="group_has_aborted")
    return DynamicFilterOutput(keep=True)


def check_response_length(args: Any, group: Any, **_: Any) -> DynamicFilterOutput:
    """Drop a group of which no trajectory came to its end in time.

    `all_truncated`: each has a sample that was cut off, as the finish reason says. `all_too_long`: each is truncated or
    has a sample of more than `--filter-max-response-len` response tokens. A group of one is judged like any other.
    """
    found = trajectories(group)
    cut_G = [any(s.status is Sample.Status.TRUNCATED for s in siblings) for siblings in found]
    if all(cut_G):
        return DynamicFilterOutput(keep=False, reason="all_truncated")
    limit = args.filter_max_response_len
    if limit is None:
        return DynamicFilterOutput(keep=True)
    longest_G = [max(s.response_length for s in siblings) for siblings in found]
    if all(cut or longest > limit for cut, longest in zip(cut_G, longest_G, strict=True)):
        return DynamicFilterOutput(keep=False, reason="all_too_long")
    return DynamicFilterOutput(keep=True)
