"""Every advantage estimator by name, and what is done around each of them."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from torch import Tensor

from miles.backends.training_utils.advantages.grpo import group_relative
from miles.backends.training_utils.advantages.ppo import gae
from miles.backends.training_utils.advantages.records import AdvantageInputs, AdvantageOutput
from miles.backends.training_utils.advantages.reinforce_plus_plus import reinforce_plus_plus
from miles.backends.training_utils.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from miles.backends.training_utils.advantages.rloo import rloo
from miles.backends.training_utils.advantages.whitening import whiten
from miles.backends.training_utils.checks import refuse_non_finite
from miles.config.estimators import EstimatorName

Estimator = Callable[[AdvantageInputs], AdvantageOutput]

ADVANTAGES: dict[EstimatorName, Estimator] = {
    "grpo": group_relative,
    "gspo": group_relative,
    "dr_grpo": group_relative,
    "dapo": group_relative,
    "cispo": group_relative,
    "sapo": group_relative,
    "gmpo": group_relative,
    "dppo": group_relative,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "ppo": gae,
}
"""Name of `--advantage-estimator` -> estimator. What each needs, and how it compares rewards, is in
`miles.config.estimators.ESTIMATORS`."""


def compute_advantages(estimator: Estimator, inputs: AdvantageInputs, *, normalize: bool) -> AdvantageOutput:
    """Advantages of a whole batch, whitened over all its trainable tokens with `normalize`; returns are not.

    Raises TrainingError naming the samples when a reward, divergence or value that is read, or an advantage that comes
    out, is NaN or infinite.
    """
    sample_R = inputs.sample_of_R
    _refuse_non_finite("reward", inputs.rewards_B[sample_R], inputs)
    if inputs.kl_R is not None and inputs.kl_coef:
        _refuse_non_finite("the divergence from the reference model", inputs.kl_R, inputs)
    if inputs.values_R is not None:
        _refuse_non_finite("values", inputs.values_R, inputs)
    output = estimator(inputs)
    _refuse_non_finite("the advantage", output.advantages_R, inputs)
    if output.returns_R is not None:
        _refuse_non_finite("the return", output.returns_R, inputs)
    if not normalize:
        return output
    return dataclasses.replace(output, advantages_R=whiten(output.advantages_R, inputs.mask_R))


def _refuse_non_finite(name: str, values_R: Tensor, inputs: AdvantageInputs) -> None:
    trainable_R = (inputs.mask_R != 0).cpu().numpy()
    samples_R = inputs.sample_index_B[inputs.sample_of_R].cpu().numpy()
    refuse_non_finite(name, np.asarray(values_R.cpu().numpy())[trainable_R], samples_R[trainable_R])
