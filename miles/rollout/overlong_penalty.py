"""DAPO's soft punishment of long responses: reward is taken off before the hard limit cuts a response."""

# B samples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles.rollout.base_types import RolloutGroup
from miles.rollout.groups import flatten, trajectories
from miles.rollout.reward_normalization import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """Nothing up to `max_response_len - buffer_len` tokens, then linearly more up to `factor` at `max_response_len`."""

    max_response_len: int
    """Tokens after which generation is cut off."""
    buffer_len: int
    """Tokens before that over which the penalty grows."""
    factor: float
    """Reward taken off a response of the greatest length, or a longer one."""

    def of(self, length: int) -> float:
        """Reward to take off a response of `length` tokens, 0 to `factor` (Yu et al. 2025, arXiv:2503.14476, section 3.4)."""
        into_buffer = length - (self.max_response_len - self.buffer_len)
        return self.factor * min(max(into_buffer / self.buffer_len, 0.0), 1.0)


def overlong_penalties(groups: Sequence[RolloutGroup], penalty: OverlongPenalty) -> Floats:
    """Reward to take off each sample, shape [B]. A trajectory of several samples is as long as its longest response."""
    by_sample = {
        id(s): penalty.of(max(sibling.response_length for sibling in siblings))
        for group in groups
        for siblings in trajectories(group)
        for s in siblings
    }
    return np.asarray([by_sample[id(s)] for group in groups for s in flatten(group)], dtype=np.float64)


def overlong_metrics(groups: Sequence[RolloutGroup], penalty: OverlongPenalty | None) -> dict[str, float]:
    """`rollout/overlong_penalty`, the mean over scored trajectories of what is taken off; nothing without a penalty."""
    if penalty is None:
        return {}
    taken = [
        penalty.of(max(sibling.response_length for sibling in siblings))
        for group in groups
        for siblings in trajectories(group)
        if any(s.reward is not None for s in siblings)
    ]
    return {"rollout/overlong_penalty": float(np.mean(taken))} if taken else {}
