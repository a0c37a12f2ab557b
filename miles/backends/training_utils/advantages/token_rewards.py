"""A trajectory's reward at its last trainable token, and the divergence at each."""

# N trainable tokens by trajectory, S trajectories that have any

from __future__ import annotations

import torch
from torch import Tensor

from miles.backends.training_utils.advantages.records import AdvantageInputs, Trajectories, kl_penalty
from miles.backends.training_utils.packing import name_samples
from miles.errors import TrainingError


def token_rewards(inputs: AdvantageInputs, tokens: Trajectories) -> Tensor:
    """-kl_coef x kl_t, plus the reward at the last trainable token of each trajectory; float64 [N].

    Raises TrainingError when samples of one trajectory have different rewards, since only one can be given.
    """
    rewards_N = -kl_penalty(inputs)[tokens.entries_N]
    rewards_S = inputs.rewards_B[tokens.sample_S].double()
    sample_N = inputs.sample_of_R[tokens.entries_N]
    differs_N = inputs.rewards_B[sample_N] != torch.repeat_interleave(
        inputs.rewards_B[tokens.sample_S], tokens.lengths_S
    )
    if bool(differs_N.any()):
        trajectory = inputs.trajectory_B[sample_N[differs_N][0]]
        siblings = inputs.sample_index_B[inputs.trajectory_B == trajectory].cpu().numpy()
        raise TrainingError(
            f"samples {name_samples(siblings)} are one trajectory but have different rewards, and this estimator gives a "
            "trajectory one reward\n    fix: return the same reward for all of them, or use --advantage-estimator grpo"
        )
    rewards_N[tokens.last_S] += rewards_S
    return rewards_N
