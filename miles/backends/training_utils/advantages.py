"""From one normalised reward per sample to one advantage per response token."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def grpo_advantages(rewards_B: Tensor, sample_of_R: Tensor) -> Tensor:
    """Give every response token its sample's group-normalised reward (Shao et al. 2024, DeepSeekMath, outcome form).

    `rewards_B` [B] is normalised within groups already; `sample_of_R` [R] says which sample a token belongs to. Returns [R].
    """
    return rewards_B[sample_of_R]


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo_advantages}
"""Name of `--advantage-estimator` -> function of rewards [B] and samples of tokens [R] that returns advantages [R]."""
