"""What a policy loss reads beside the current log-probs, for a whole batch: old policy, advantages, corrections."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.backends.training_utils.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageOutput,
    CustomAdvantages,
    compute_advantages,
)
from miles.backends.training_utils.advantages.turns import require_turn_order
from miles.backends.training_utils.data_postprocess import DataPostprocess
from miles.backends.training_utils.loss_hub.corrections import Correction, build_correction, correct
from miles.backends.training_utils.loss_hub.kl import kl_estimate
from miles.backends.training_utils.loss_hub.records import SampleLayout
from miles.backends.training_utils.loss_hub.tis_hook import TisHook
from miles.backends.training_utils.packing import FlatBatch
from miles.config.estimators import ESTIMATORS, whitens
from miles.config.schema import AlgorithmConfig, CorrectionConfig
from miles.core.plugins import load_function
from miles.core.train_batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyColumns:
    """Per-token values of a batch by their names in `LossInputs`, all [R]."""

    values: dict[str, Tensor]
    mask_R: np.ndarray[Any, np.dtype[np.float32]]
    """The loss mask without rejected tokens."""
    metrics: dict[str, float]
    returns_R: Tensor | None = None
    """What a critic is trained towards."""


class PolicyPreparation:
    """Makes the columns of a batch from its rewards and log-probs; the same on all ranks, which all hold the whole batch."""

    def __init__(self, algorithm: AlgorithmConfig, correction: CorrectionConfig, args: Any = None) -> None:
        """Load the functions that the settings name; `args` is what they get. Raises HookError when one cannot be loaded."""
        self._algorithm = algorithm
        self._correction: Correction = build_correction(correction)
        path = correction.custom_tis_function_path
        self.hook = None if path is None else TisHook(load_function(path), args)
        self._postprocess = None
        if (post_path := algorithm.data_postprocess_path) is not None:
            self._postprocess = DataPostprocess(fn=load_function(post_path), args=args, path=post_path)
        self._path = algorithm.custom_advantage_function_path
        self._advantage_fn = None if self._path is None else load_function(self._path)
        self._args = args

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the batch must have the engine's log-probs."""
        return self._algorithm.use_rollout_logprobs or self._corrects or self._algorithm.get_mismatch_metrics

    @property
    def needs_trainer_log_probs(self) -> bool:
        """Whether the trainer must score the batch before its first optimizer step."""
        algorithm = self._algorithm
        if algorithm.skip_actor_forward_only:
            return False
        asked_for = algorithm.get_mismatch_metrics or algorithm.use_rollout_entropy
        return not algorithm.use_rollout_logprobs or self._corrects or asked_for

    @property
    def _corrects(self) -> bool:
        return self._correction.is_active or self.hook is not None

    def __call__(
        self,
        batch: TrainBatch,
        packed: FlatBatch,
        trainer_R: Tensor | None,
        ref_R: Tensor | None,
        values_R: Tensor | None = None,
    ) -> PolicyColumns:
        """Columns of `batch`. `trainer_R` and `ref_R` are log-probs under the weights before the first step, and the reference;
        `values_R` are those of a critic before its first step. With `--skip-actor-forward-only` there are no old ones.

        Raises TrainingError naming samples and column when a value that is read is NaN or infinite.
        """
        rollout_R = None
        if "rollout_log_probs" in batch:
            rollout_R = torch.from_numpy(np.array(batch["rollout_log_probs"].values, dtype=np.float32))
        old_R = rollout_R if self._algorithm.use_rollout_logprobs else trainer_R
        if old_R is None and not self._algorithm.skip_actor_forward_only:
            raise ValueError("old log-probs are missing: score the batch, or let the rollout return its log-probs")
        columns = {"log_probs": old_R, "rollout_log_probs": rollout_R, "ref_log_probs": ref_R}
        given = {name: x_R for name, x_R in columns.items() if x_R is not None}
        inputs = self._inputs(batch, packed, old_R, ref_R, values_R)
        if self._postprocess is not None:
            inputs = self._postprocess(inputs, given)
        estimated = self._advantages(batch, packed, inputs, given)
        values = {"advantages_N": estimated.advantages_R}
        if old_R is not None:
            values["old_logprobs_N"] = old_R
        if ref_R is not None:
            values["ref_logprobs_N"] = ref_R
        if rollout_R is not None:
            values["rollout_logprobs_N"] = rollout_R
        trainable_R = inputs.mask_R != 0
        keep_R, metrics = trainable_R, dict[str, float]()
        if rollout_R is not None and trainer_R is not None:
            trajectory_R = numbers(batch, "trajectory")[torch.from_numpy(packed.sample_of_R)]
            found = correct(trainer_R, rollout_R, trainable_R, trajectory_R, self._correction)
            keep_R, metrics = found.keep_R, found.metrics
            if self._correction.is_active:
                values["correction_N"] = found.weights_R
            if self.hook is not None:
                layout = whole_layout(batch, packed)
                keep_R &= self.hook.keep(trainer_R, rollout_R, trainable_R, layout, packed.sample_index_B)
        mask_R = packed.mask_R * keep_R.numpy()
        return PolicyColumns(values=values, mask_R=mask_R, metrics=metrics, returns_R=estimated.returns_R)

    def _inputs(
        self, batch: TrainBatch, packed: FlatBatch, old_R: Tensor | None, ref_R: Tensor | None, values_R: Tensor | None
    ) -> AdvantageInputs:
        algorithm = self._algorithm
        kl_R = None
        if old_R is not None and ref_R is not None and algorithm.kl_coef:
            trainable_R = torch.from_numpy(packed.mask_R != 0)
            kl_R = torch.where(trainable_R, kl_estimate(old_R, ref_R, algorithm.kl_loss_type), 0)
        return AdvantageInputs(
            rewards_B=torch.tensor(np.asarray(batch["reward"].values), dtype=torch.float32),
            trajectory_B=numbers(batch, "trajectory"),
            group_B=numbers(batch, "group_index"),
            # A copy: torch warns of arrays that are not to be written to, as those are that came through Ray.
            sample_index_B=torch.tensor(packed.sample_index_B),
            sample_of_R=torch.from_numpy(packed.sample_of_R),
            mask_R=torch.from_numpy(packed.mask_R),
            kl_R=kl_R,
            values_R=values_R,
            gamma=algorithm.gamma,
            lam=algorithm.lambd,
            kl_coef=algorithm.kl_coef,
        )

    def _advantages(
        self, batch: TrainBatch, packed: FlatBatch, inputs: AdvantageInputs, columns: dict[str, Tensor]
    ) -> AdvantageOutput:
        algorithm = self._algorithm
        estimator = ADVANTAGES[algorithm.advantage_estimator]
        if ESTIMATORS[algorithm.advantage_estimator].discounts and self._advantage_fn is None:
            require_turn_order(batch, packed, inputs.trajectory_B.numpy())
        if self._advantage_fn is not None:
            estimator = CustomAdvantages(
                fn=self._advantage_fn, args=self._args, path=self._path or "", columns=columns
            )
        normalize = whitens(
            algorithm.advantage_estimator, algorithm.normalize_advantages, custom=self._advantage_fn is not None
        )
        return compute_advantages(estimator, inputs, normalize=normalize)


def numbers(batch: TrainBatch, name: str) -> Tensor:
    """A sample column of whole numbers, or the samples' positions when the batch has none; shape [B]."""
    return torch.from_numpy(np.array(batch[name].values if name in batch else np.arange(len(batch))))


def whole_layout(batch: TrainBatch, packed: FlatBatch) -> SampleLayout:
    """The layout of a whole batch, whose places are the response axis itself."""
    return SampleLayout(
        total_lengths=packed.total_lengths_B.tolist(),
        response_lengths=batch.response_lengths.tolist(),
        places_N=torch.arange(len(packed.mask_R)),
    )


def layout_of(
    entries_N: Tensor, packed: FlatBatch, response_lengths_B: np.ndarray[Any, np.dtype[np.int64]]
) -> SampleLayout:
    """The layout of the samples that the micro-batch of these response entries has a trainable token of."""
    sample_N = packed.sample_of_R[entries_N.numpy()]
    samples, index_N = np.unique(sample_N, return_inverse=True)
    lengths = response_lengths_B[samples]
    start_B = np.cumsum(lengths) - lengths
    places_N = start_B[index_N] + entries_N.numpy() - packed.response_start_B[sample_N]
    return SampleLayout(
        total_lengths=packed.total_lengths_B[samples].tolist(),
        response_lengths=lengths.tolist(),
        places_N=torch.from_numpy(places_N),
    )


def tokens_elsewhere(
    parts: Sequence[np.ndarray[Any, np.dtype[np.int64]]],
    step_entries: np.ndarray[Any, np.dtype[np.int64]],
    trajectory_R: np.ndarray[Any, np.dtype[np.int64]],
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """For each micro-batch, entries of its trajectories that it does not have.

    `parts` are the response entries of a rank's micro-batches, `step_entries` all those of the optimizer step.
    """
    found = []
    for entries in parts:
        outside = np.setdiff1d(step_entries, entries, assume_unique=True)
        found.append(outside[np.isin(trajectory_R[outside], trajectory_R[entries])])
    return found
