"""REINFORCE++ with the group's mean as baseline, whitened over the batch."""

from __future__ import annotations

from miles.backends.training_utils.advantages.records import (
    AdvantageInputs,
    AdvantageOutput,
    kl_penalty,
    on_trainable_tokens,
)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_t = r - kl_coef x kl_t with r the reward minus its group's mean; [R].

    Hu et al. 2025, arXiv:2501.03262, the variant for several responses to a prompt; to be whitened.
    """
    advantages_R = on_trainable_tokens(inputs.rewards_B, inputs)
    return AdvantageOutput(advantages_R=(advantages_R.double() - kl_penalty(inputs)).to(advantages_R.dtype))
