"""What losses read of a batch beside the current log-probs, from passes over the weights before the first optimizer step.

The parity gate is part of it: it compares the engine's log-probs with those of such a pass, or of the first step itself.
"""

# R response tokens of all samples end to end

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.fsdp_utils.parity_gate import LateGate, check_parity
from miles.backends.fsdp_utils.passes import Passes, gathered
from miles.backends.fsdp_utils.planned_batch import PlannedBatch
from miles.backends.fsdp_utils.roles import Roles
from miles.backends.training_utils.ci_checks import CiChecks
from miles.backends.training_utils.loss_hub.corrections import Correction, correct
from miles.backends.training_utils.parity import ParityBounds
from miles.backends.training_utils.policy_columns import PolicyColumns, PolicyPreparation
from miles.config.schema import RunConfig
from miles.core.train_batch import TrainBatch

TRAINERS_LOG_PROB = "the trainer's log-prob"


class Scoring:
    """Old log-probs, values and advantages of a batch, and the parity gate; the same on all ranks, and collective."""

    def __init__(
        self,
        config: RunConfig,
        roles: Roles,
        passes: Passes,
        preparation: PolicyPreparation,
        bounds: ParityBounds,
        ci: CiChecks,
    ) -> None:
        self._roles, self._passes, self._preparation = roles, passes, preparation
        self._rollout, self._has_gate = config.rollout, config.parity.enabled
        self._is_sft = config.algorithm.loss_type == "sft_loss"
        self._is_late = config.algorithm.skip_actor_forward_only
        self._bounds, self._ci = bounds, ci

    def needed_columns(self, batch: TrainBatch) -> tuple[str, ...]:
        """Columns that must be there, and be finite where they are read."""
        if self._is_sft:
            return ()
        compares = self._has_gate or self._preparation.needs_rollout_log_probs or "rollout_log_probs" in batch
        return ("reward", "rollout_log_probs") if compares else ("reward",)

    def __call__(self, work: PlannedBatch, metrics: dict[str, float]) -> tuple[PolicyColumns, Tensor | None]:
        """What the losses read on the response axis [R], the mask without rejected tokens, and the critic's values [R].

        Fills `metrics`. Raises ParityError above the bounds, and TrainingError where a score is NaN or infinite.
        """
        if self._is_sft:
            return PolicyColumns(values={}, mask_R=work.packed.mask_R, metrics={}), None
        values_R = self._old_values(work, metrics)
        trainer_R = ref_R = None
        if (self._has_gate and not self._is_late) or self._preparation.needs_trainer_log_probs:
            policy = self._roles.policy
            trainer_R = self._passes.batch(policy, work.parts, work.packed, TRAINERS_LOG_PROB, metrics, "log_probs")
            if self._has_gate:
                differences = self._parity_gate(work, trainer_R)
                metrics |= {f"train/{name}": value for name, value in differences.items()}
        if self._roles.reference is not None:
            name = "the reference model's log-prob"
            ref_R = self._passes.batch(self._roles.reference, work.parts, work.packed, name, metrics, "ref_log_probs")
        found = self._preparation(work.batch, work.packed, trainer_R, ref_R, values_R)
        self._ci.log_probs(found.metrics, step=work.step)
        metrics |= {f"train/{name}": value for name, value in found.metrics.items()}
        return found, values_R

    def late_gate(
        self, work: PlannedBatch, step_entries: NDArray[np.int64], metrics: dict[str, float]
    ) -> LateGate | None:
        """Parity, and how far the engine is, from the log-probs of the optimizer step itself; fills `metrics`.

        None where a pass before the step has told it.
        """

        def check(logprobs_R: Tensor) -> None:
            now_R = gathered(logprobs_R, work.packed, TRAINERS_LOG_PROB)
            if self._has_gate:
                metrics.update(self._parity_gate(work, now_R))
            if "rollout_log_probs" in work.batch:
                rollout_R = torch.from_numpy(np.array(work.batch["rollout_log_probs"].values, dtype=np.float32))
                counted_R = torch.zeros(len(now_R), dtype=torch.bool)
                counted_R[torch.from_numpy(step_entries)] = True
                found = correct(now_R, rollout_R, counted_R, work.trajectory_R, Correction()).metrics
                self._ci.log_probs(found, step=work.step)
                metrics.update(found)

        return LateGate(len(work.packed.mask_R), check) if self._is_late else None

    def _old_values(self, work: PlannedBatch, metrics: dict[str, float]) -> Tensor | None:
        """The critic's values of all trainable tokens [R] before it is trained; none is NaN or inf."""
        critic = self._roles.critic
        if critic is None:
            return None
        started = time.perf_counter()
        values_R = critic.values(work.parts, len(work.packed.mask_R))
        values_R = gathered(values_R, work.packed, "the critic's value")
        metrics["perf/values_time"] = time.perf_counter() - started
        return values_R

    def _parity_gate(self, work: PlannedBatch, old_R: Tensor) -> dict[str, float]:
        """How far the engine's log-probs are from the trainer's `old_R` [R], as metrics. Raises ParityError above the bounds."""
        return check_parity(
            work.batch,
            work.packed,
            old_R,
            score=self._passes.sequences,
            bounds=self._bounds,
            rollout=self._rollout,
            step=work.step,
        )


__all__ = ["Scoring"]
