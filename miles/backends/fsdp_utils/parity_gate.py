"""The parity gate of a batch, from a pass before the first optimizer step, or from the log-probs of that step itself."""

# R response tokens of all samples end to end, N predicted tokens of a micro-batch

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from miles.backends.training_utils.packing import FlatBatch
from miles.backends.training_utils.parity import (
    ParityBounds,
    ParityCause,
    ScoredSequence,
    compare,
    explain,
    hold_against,
)
from miles.config.schema import RolloutConfig
from miles.core.train_batch import TrainBatch

EXPLAINED_SEQUENCES = 4


class LateGate:
    """Collects the log-probs of an optimizer step, for a check between its last micro-batch and the update."""

    def __init__(self, num_entries: int, check: Callable[[Tensor], None]) -> None:
        """`check` gets this rank's log-probs [R], 0 where it has none; it may raise."""
        self._logprobs_R = torch.zeros(num_entries)
        self._check = check

    def see(self, entries_N: Tensor, logprobs_N: Tensor) -> None:
        """Take note of the log-probs of a micro-batch's predicted tokens."""
        self._logprobs_R[entries_N] = logprobs_N.detach().cpu()

    def close(self) -> None:
        """Check what was seen."""
        self._check(self._logprobs_R)


def check_parity(
    batch: TrainBatch,
    packed: FlatBatch,
    old_R: Tensor,
    *,
    score: Callable[[list[list[int]], float], list[list[float]]],
    bounds: ParityBounds,
    rollout: RolloutConfig,
    step: int,
) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's `old_R` [R] over trainable tokens, in nats, as metrics.

    Raises ParityError above the bounds, unless they only warn; what differs is then sought with `score`, log-probs of
    sequences at a temperature.
    """
    engine_R = np.asarray(batch["rollout_log_probs"].values)
    sample_R, places = packed.sample_of_R, packed.trainable
    report = compare(old_R.numpy()[places], engine_R[places], packed.sample_index_B[sample_R[places]])

    def find_cause() -> ParityCause:
        worst_B = np.zeros(len(batch))
        np.maximum.at(worst_B, sample_R[places], np.abs(old_R.numpy()[places] - engine_R[places]))
        picked = np.argsort(-worst_B, kind="stable")[:EXPLAINED_SEQUENCES].tolist()
        versions = np.asarray(batch["weight_version"].values)[packed.trainable_B] if "weight_version" in batch else ()
        return explain(
            [
                ScoredSequence(
                    sample=int(packed.sample_index_B[b]),
                    tokens=batch["tokens"].row(b).tolist(),
                    engine_R=batch["rollout_log_probs"].row(b).tolist(),
                    mask_R=(batch["loss_mask"].row(b) != 0).tolist(),
                )
                for b in picked
            ],
            score,
            bounds=bounds,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            weight_versions=sorted({str(v) for v in versions}),
        )

    hold_against(report, bounds, f"samples of rollout step {step}", find_cause)
    return {f"rollout_logprob_abs_diff_{name}": getattr(report, name) for name in ("mean", "p99", "max")}
