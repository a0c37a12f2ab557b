"""Rewards compared within the group of trajectories that answer one prompt."""

# B samples, G trajectories of one prompt group

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miles.config.estimators import Baseline

STD_EPS = 1e-6

Floats = NDArray[np.float64]


def normalize_group(rewards_G: Sequence[float] | Floats, baseline: Baseline) -> Floats:
    """Rewards of one group against `baseline`, shape [G].

    `mean_std`: (r - mean) / (unbiased standard deviation + 1e-6), the outcome-supervised advantage of GRPO (Shao et al.
    2024, arXiv:2402.03300, section 4.1.2). `mean`: r - mean, Dr. GRPO's (Liu et al. 2025, arXiv:2503.20783).
    `leave_one_out`: r minus the mean of the others, which is (r - mean) G / (G - 1), RLOO's (Ahmadian et al. 2024,
    arXiv:2402.14740). Computed in float64. Equal rewards give exactly 0, and so does a group of one, which has nothing
    to be compared with.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards_G) < 2 or bool((rewards_G == rewards_G[0]).all()):
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if baseline == "mean":
        return centred_G
    if baseline == "leave_one_out":
        return centred_G * (len(rewards_G) / (len(rewards_G) - 1))
    return centred_G / (rewards_G.std(ddof=1) + STD_EPS)


def normalize_rewards(
    rewards_B: Sequence[float] | Floats,
    *,
    group_B: Sequence[int],
    trajectory_B: Sequence[int],
    counted_B: Sequence[bool] | None = None,
    baseline: Baseline,
) -> Floats:
    """`normalize_group` within each prompt group, shape [B].

    A trajectory counts once and its samples share the result; they must have equal rewards. Trajectories without any
    sample in `counted_B` (nothing of them is trainable) do not enter mean and deviation, and get 0.

    Raises ValueError when samples of one trajectory have different rewards.
    """
    rewards_B = np.asarray(rewards_B, dtype=np.float64)
    counted = [True] * len(rewards_B) if counted_B is None else list(counted_B)
    groups: dict[int, dict[int, list[int]]] = {}
    for b, (group, trajectory) in enumerate(zip(group_B, trajectory_B, strict=True)):
        groups.setdefault(group, {}).setdefault(trajectory, []).append(b)
    normalized_B = np.zeros_like(rewards_B)
    for group, members in groups.items():
        for trajectory, rows in members.items():
            if any(rewards_B[b] != rewards_B[rows[0]] for b in rows):
                raise ValueError(
                    f"group {group}: the samples of trajectory {trajectory} have the rewards "
                    f"{[float(rewards_B[b]) for b in rows]}; they must agree"
                )
        kept = [rows for rows in members.values() if any(counted[b] for b in rows)]
        values_G = normalize_group([float(rewards_B[rows[0]]) for rows in kept], baseline)
        for rows, value in zip(kept, values_G, strict=True):
            normalized_B[rows] = value
    return normalized_B
