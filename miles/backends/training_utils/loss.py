"""Which loss a run trains, from its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from miles.backends.training_utils.loss_hub.custom_loss import CustomLoss
from miles.backends.training_utils.loss_hub.denominators import Denominator
from miles.backends.training_utils.loss_hub.objectives import Bounds
from miles.backends.training_utils.loss_hub.pg_reducer import PgReducer
from miles.backends.training_utils.loss_hub.policy_loss import CorrectTerms, PolicyLoss
from miles.backends.training_utils.loss_hub.records import LossInputs, LossOutput
from miles.backends.training_utils.loss_hub.sft_loss import SftLoss
from miles.config.objectives import denominator_of, objective_of
from miles.config.schema import AlgorithmConfig
from miles.core.plugins import load_function


class Loss(Protocol):
    """A loss of one micro-batch."""

    @property
    def needs_trajectories(self) -> bool:
        """Whether terms depend on the whole trajectory: then `LossInputs.other` must hold what is in other micro-batches."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's addend to the step's loss."""
        ...


def _policy_loss(algorithm: AlgorithmConfig, args: Any, correct_terms: CorrectTerms | None) -> Loss:
    path, per_token = algorithm.custom_pg_loss_reducer_function_path, algorithm.calculate_per_token_loss
    return PolicyLoss(
        objective=objective_of(algorithm.advantage_estimator, algorithm.policy_objective),
        bounds=Bounds(
            clip_low=algorithm.eps_clip,
            clip_high=algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
            dual_clip=algorithm.eps_clip_c,
            tau_pos=algorithm.sapo_tau_pos,
            tau_neg=algorithm.sapo_tau_neg,
            divergence=algorithm.dppo_divergence,
            divergence_bound=algorithm.dppo_bound,
        ),
        opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
        entropy_coef=algorithm.entropy_coef,
        kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        kl_kind=algorithm.kl_loss_type,
        kl_unbiased=algorithm.use_unbiased_kl,
        correct_terms=correct_terms,
        reduce_terms=None if path is None else PgReducer(load_function(path), per_token=per_token),
        old_is_current=algorithm.skip_actor_forward_only,
    )


def _sft_loss(algorithm: AlgorithmConfig, args: Any, correct_terms: CorrectTerms | None) -> Loss:
    return SftLoss()


def _custom_loss(algorithm: AlgorithmConfig, args: Any, correct_terms: CorrectTerms | None) -> Loss:
    assert algorithm.custom_loss_function_path is not None
    return CustomLoss(load_function(algorithm.custom_loss_function_path), args)


LOSSES: dict[str, Callable[[AlgorithmConfig, Any, CorrectTerms | None], Loss]] = {
    "policy_loss": _policy_loss,
    "sft_loss": _sft_loss,
    "custom_loss": _custom_loss,
}
"""Every value of `--loss-type`."""


def build_loss(algorithm: AlgorithmConfig, *, args: Any = None, correct_terms: CorrectTerms | None = None) -> Loss:
    """The loss that `algorithm.loss_type` names; `args` is what users' functions get, `correct_terms` their correction."""
    return LOSSES[algorithm.loss_type](algorithm, args, correct_terms)


def build_denominator(algorithm: AlgorithmConfig, *, max_response_len: int) -> Denominator:
    """What the loss is divided by; `max_response_len` is the constant of `constant` unless one is given."""
    kind = denominator_of(
        algorithm.advantage_estimator,
        algorithm.loss_denominator,
        per_token=algorithm.calculate_per_token_loss,
        supervised=algorithm.loss_type == "sft_loss",
    )
    constant = max_response_len if algorithm.loss_constant is None else algorithm.loss_constant
    return Denominator(kind=kind, constant=float(constant))
