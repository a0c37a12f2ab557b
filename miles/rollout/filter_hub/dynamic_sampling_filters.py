"""The dynamic sampling filters that ship with Miles."""

from __future__ import annotations

from typing import Any

import numpy as np

from miles.core.samples import Sample
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.groups import flatten, trajectory_rewards

SMALLEST_STD = 1e-8


def check_reward_nonzero_std(args: Any, group: Any, **_: Any) -> DynamicFilterOutput:
    """Keep a group whose trajectories have different rewards: one with equal rewards teaches nothing.

    A trajectory counts once, however many samples it became. A group of one trajectory has no spread to judge and is
    kept. Dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476).
    """
    rewards_G = np.asarray(trajectory_rewards(group, args.reward_key), dtype=np.float64)
    if len(rewards_G) < 2:
        return DynamicFilterOutput(keep=True)
    if float(rewards_G.max()) != float(rewards_G.min()) and float(rewards_G.std(ddof=1)) > SMALLEST_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(float(rewards_G[0]), 1)}")


def check_no_aborted(args: Any, group: Any, **_: Any) -> DynamicFilterOutput:
    """Keep a group that has no aborted sample."""
    if any(sample.status is Sample.Status.ABORTED for sample in flatten(group)):
        return DynamicFilterOutput(keep=False, reason="group_has_aborted")
    return DynamicFilterOutput(keep=True)
