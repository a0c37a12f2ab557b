"""GRPO and its kin: every token of a response is as good as the response was within its group."""

from __future__ import annotations

from miles.backends.training_utils.advantages.records import AdvantageInputs, AdvantageOutput, on_trainable_tokens


def group_relative(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_t = r, the reward that was compared within its group when the batch was made; [R].

    With r = (R - mean) / (std + 1e-6) over the group this is GRPO with outcome supervision (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2), without the division it is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). The
    estimators that differ from GRPO in the loss alone have the same advantages.
    """
    return AdvantageOutput(advantages_R=on_trainable_tokens(inputs.rewards_B, inputs))
