"""RLOO: a response against the mean of the others to its prompt, the divergence being part of the reward."""

# B samples, S trajectories with trainable tokens, G groups

from __future__ import annotations

import torch
from torch import Tensor

from miles.backends.training_utils.advantages.records import (
    AdvantageInputs,
    AdvantageOutput,
    Trajectories,
    kl_penalty,
    on_trainable_tokens,
)


def rloo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_t = R_i - mean of R_j over the other trajectories j of the prompt, R = reward - kl_coef x sum of kl_t; [R].

    REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740): a whole response is
    one action. `rewards_B` has been compared so already; the divergence is compared here, which adds up to the same.
    The only trajectory of a group that can be trained on has nothing to be compared with: its divergence counts as 0.
    """
    rewards_B = inputs.rewards_B
    if inputs.kl_coef:
        tokens = Trajectories(inputs)
        penalty_S = leave_one_out(tokens.sums(kl_penalty(inputs)[tokens.entries_N]), inputs.group_B[tokens.sample_S])
        trajectory_B = inputs.trajectory_B
        _, number_B = torch.unique(trajectory_B, return_inverse=True)
        penalty_of = penalty_S.new_zeros(len(trajectory_B))
        penalty_of[number_B[tokens.sample_S]] = penalty_S
        rewards_B = (rewards_B.double() - penalty_of[number_B]).to(rewards_B.dtype)
    return AdvantageOutput(advantages_R=on_trainable_tokens(rewards_B, inputs))


def leave_one_out(values_S: Tensor, group_S: Tensor) -> Tensor:
    """Each value minus the mean of the other values of its group; 0 in a group of one. Shape [S]."""
    _, number_S, count_G = torch.unique(group_S, return_inverse=True, return_counts=True)
    count_G = count_G.to(values_S.dtype)  # whole numbers would be divided in fp32
    mean_G = values_S.new_zeros(len(count_G)).index_add_(0, number_S, values_S) / count_G
    scale_G = torch.where(count_G > 1, count_G / (count_G - 1).clamp(min=1), 0.0)
    return (values_S - mean_G[number_S]) * scale_G[number_S]
