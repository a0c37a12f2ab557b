"""Which objective, denominator and correction the settings mean, where one follows from another."""

from __future__ import annotations

from typing import Literal

from miles.config.estimators import EstimatorName

ObjectiveName = Literal["ppo", "gspo", "gmpo", "cispo", "sapo", "dppo"]
DenominatorName = Literal["trajectories", "sequences", "prompts", "tokens", "constant"]
CorrectionPreset = Literal["none", "tis", "mis", "icepop", "rejection", "decoupled_ppo"]

OBJECTIVES: dict[EstimatorName, ObjectiveName] = {
    "gspo": "gspo",
    "gmpo": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo": "dppo",
}
"""The objective of an estimator that is named after it; all others have `ppo`."""
DENOMINATORS: dict[EstimatorName, DenominatorName] = {"dapo": "tokens", "dr_grpo": "constant"}
"""The denominator of an estimator that comes with one; all others have `trajectories`."""


def objective_of(estimator: EstimatorName, chosen: ObjectiveName | None) -> ObjectiveName:
    """The objective that a run trains with: the chosen one, or else the estimator's."""
    return chosen or OBJECTIVES.get(estimator, "ppo")


def denominator_of(
    estimator: EstimatorName, chosen: DenominatorName | None, *, per_token: bool, supervised: bool
) -> DenominatorName:
    """The denominator that a run trains with: the chosen one, or else `tokens` when asked for, or else the estimator's."""
    if chosen or per_token:
        return chosen or "tokens"
    return "trajectories" if supervised else DENOMINATORS.get(estimator, "trajectories")
