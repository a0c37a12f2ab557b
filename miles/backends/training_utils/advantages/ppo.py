"""PPO: generalised advantage estimation with a critic's values."""

# N trainable tokens by trajectory

from __future__ import annotations

import torch

from miles.backends.training_utils.advantages.discounted_sums import discounted_sums
from miles.backends.training_utils.advantages.records import AdvantageInputs, AdvantageOutput, Trajectories
from miles.backends.training_utils.advantages.token_rewards import token_rewards
from miles.errors import TrainingError


def gae(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_t = sum over k >= 0 of (gamma lam)^k d_{t+k}, d_t = r_t + gamma V_{t+1} - V_t, and returns A_t + V_t; both [R].

    r_t = -kl_coef x kl_t, plus the reward at the last trainable token. Steps are the trainable tokens of a trajectory:
    t + 1 is the next token that the policy chose, however many it was shown in between. V after the last token is 0,
    also when the response was cut off. Schulman et al. 2016, arXiv:1506.02438, equation 16.

    Raises TrainingError without values.
    """
    if inputs.values_R is None:
        raise TrainingError(
            "--advantage-estimator ppo needs a value of every trainable token, and the batch has no column values"
            "\n    fix: train a critic, or use an estimator without one such as reinforce_plus_plus"
        )
    tokens = Trajectories(inputs)
    values_N = inputs.values_R[tokens.entries_N].double()
    next_N = torch.cat([values_N[1:], values_N.new_zeros(min(1, len(values_N)))])
    next_N[tokens.last_S] = 0
    errors_N = token_rewards(inputs, tokens) + inputs.gamma * next_N - values_N
    advantages_N = discounted_sums(errors_N, tokens.lengths_S, inputs.gamma * inputs.lam)
    return AdvantageOutput(
        advantages_R=tokens.on_response_axis(advantages_N, inputs),
        returns_R=tokens.on_response_axis(advantages_N + values_N, inputs),
    )
