"""REINFORCE++: discounted rewards to go, whitened over the batch."""

from __future__ import annotations

from miles.backends.training_utils.advantages.discounted_sums import discounted_sums
from miles.backends.training_utils.advantages.records import AdvantageInputs, AdvantageOutput, Trajectories
from miles.backends.training_utils.advantages.token_rewards import token_rewards


def reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_t = sum over k >= 0 of gamma^k r_{t+k}, r_t = -kl_coef x kl_t plus the reward at the last trainable token; [R].

    Steps are the trainable tokens of a trajectory. Hu et al. 2025, arXiv:2501.03262; to be whitened.
    """
    tokens = Trajectories(inputs)
    returns_N = discounted_sums(token_rewards(inputs, tokens), tokens.lengths_S, inputs.gamma)
    return AdvantageOutput(advantages_R=tokens.on_response_axis(returns_N, inputs))
