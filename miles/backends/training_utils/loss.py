"""Which loss a run trains, and how much each token weighs in it."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from miles.backends.training_utils.loss_hub.policy_loss import PolicyLoss
from miles.backends.training_utils.loss_hub.records import LossInputs, LossOutput
from miles.backends.training_utils.loss_hub.sft_loss import sft_loss
from miles.config.schema import AlgorithmConfig

LossFn = Callable[[LossInputs], LossOutput]


def _policy_loss(algorithm: AlgorithmConfig) -> LossFn:
    return PolicyLoss(
        clip_low=algorithm.eps_clip,
        clip_high=algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
        dual_clip=algorithm.eps_clip_c,
        entropy_coef=algorithm.entropy_coef,
        kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        kl_kind=algorithm.kl_loss_type,
    )


LOSSES: dict[str, Callable[[AlgorithmConfig], LossFn]] = {
    "policy_loss": _policy_loss,
    "sft_loss": lambda algorithm: sft_loss,
}


def build_loss(algorithm: AlgorithmConfig) -> LossFn:
    """The loss that `algorithm.loss_type` names."""
    return LOSSES[algorithm.loss_type](algorithm)


def token_weights(
    mask_R: NDArray[np.float32],
    sample_of_R: NDArray[np.int64],
    trajectory_B: NDArray[np.int64],
    steps: Sequence[NDArray[np.int64]],
    *,
    per_token: bool,
) -> NDArray[np.float32]:
    """Each response token's weight in the loss of its optimizer step, over the whole step: all micro-batches, all ranks.

    `steps` lists the samples of each optimizer step; a trajectory lies within one step. By default a trajectory's tokens
    share weight 1 / (trajectories of the step with a trainable token), however many samples the trajectory is split into.
    `per_token` weighs every trainable token of the step alike. The weights of a step sum to 1, or to 0 when it has no
    trainable token. Returns [R].
    """
    step_of_B = np.full(len(trajectory_B), -1, dtype=np.int64)
    for number, samples in enumerate(steps):
        step_of_B[samples] = number
    mask = mask_R.astype(np.float64) * (step_of_B[sample_of_R] >= 0)
    _, trajectory_B = np.unique(trajectory_B, return_inverse=True)
    if per_token:
        total = np.bincount(step_of_B[sample_of_R] + 1, weights=mask, minlength=len(steps) + 1)
        denominator_B = total[step_of_B + 1]
    else:
        tokens = np.bincount(trajectory_B[sample_of_R], weights=mask, minlength=len(trajectory_B))
        step_of_trajectory = np.full(len(tokens), -1, dtype=np.int64)
        step_of_trajectory[trajectory_B] = step_of_B
        counted = np.bincount(step_of_trajectory + 1, weights=tokens > 0, minlength=len(steps) + 1)
        denominator_B = tokens[trajectory_B] * counted[step_of_B + 1]
    return (mask / np.maximum(denominator_B, 1.0)[sample_of_R]).astype(np.float32)
