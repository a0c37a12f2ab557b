"""What each advantage estimator needs, and how it compares the rewards of a prompt's trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Baseline = Literal["mean", "mean_std", "leave_one_out"]
"""What a trajectory's reward is compared with: its group's mean; the same in standard deviations; the others' mean."""

EstimatorName = Literal[
    "grpo",
    "gspo",
    "dr_grpo",
    "dapo",
    "cispo",
    "sapo",
    "gmpo",
    "dppo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorFacts:
    """What the rest of the system has to know of an estimator. Its formula is in `training_utils/advantages`."""

    baseline: Baseline | None = None
    """How rewards are compared within a prompt's group when a batch is made; None leaves them as they are."""
    uses_kl: bool = False
    """Whether `--kl-coef` takes the divergence from the reference model off the reward."""
    discounts: bool = False
    """Whether `--gamma` counts: the reward is given at the last token and handed back to earlier ones."""
    needs_values: bool = False
    """Whether it needs a critic's value of each trainable token; then `--lambd` counts too."""
    must_whiten: bool = False
    """Whether it is only defined with whitened advantages, so that it brings `--normalize-advantages` along."""


_GROUP_RELATIVE = EstimatorFacts(baseline="mean_std")

ESTIMATORS: dict[EstimatorName, EstimatorFacts] = {
    "grpo": _GROUP_RELATIVE,
    "gspo": _GROUP_RELATIVE,
    "dr_grpo": EstimatorFacts(baseline="mean"),
    "dapo": _GROUP_RELATIVE,
    "cispo": _GROUP_RELATIVE,
    "sapo": _GROUP_RELATIVE,
    "gmpo": _GROUP_RELATIVE,
    "dppo": _GROUP_RELATIVE,
    "rloo": EstimatorFacts(baseline="leave_one_out", uses_kl=True),
    "reinforce_plus_plus": EstimatorFacts(uses_kl=True, discounts=True, must_whiten=True),
    "reinforce_plus_plus_baseline": EstimatorFacts(baseline="mean", uses_kl=True, must_whiten=True),
    "ppo": EstimatorFacts(uses_kl=True, discounts=True, needs_values=True),
}
"""Facts of every value of `--advantage-estimator`. What differs in the loss alone has the advantages of `grpo`."""


def whitens(estimator: EstimatorName, chosen: bool | None, *, custom: bool) -> bool:
    """Whether a run whitens advantages: as chosen, or else as the estimator's formula needs, which `custom` replaces."""
    return (ESTIMATORS[estimator].must_whiten and not custom) if chosen is None else chosen


def group_baseline(estimator: EstimatorName, *, normalize: bool, divide_std: bool) -> Baseline | None:
    """The comparison that a run makes: none without `normalize`, and no division by the deviation without `divide_std`."""
    baseline = ESTIMATORS[estimator].baseline
    if not normalize:
        return None
    return "mean" if baseline == "mean_std" and not divide_std else baseline
