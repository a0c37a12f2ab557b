"""What must hold of a batch before it is trained on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miles.backends.training_utils.packing import FlatBatch, name_samples
from miles.core.train_batch import TrainBatch
from miles.errors import TrainingError


def check_batch(batch: TrainBatch, packed: FlatBatch, *, vocab_size: int, columns: tuple[str, ...]) -> None:
    """Raise TrainingError when a column is missing, a token id is outside the vocabulary, or a value is NaN or inf.

    Values at masked response tokens are not read, so they may be anything.
    """
    if missing := [name for name in columns if name not in batch]:
        raise TrainingError(
            f"the batch lacks the columns {', '.join(missing)}\n    fix: return them from the rollout; generate "
            "functions set rollout_log_probs, reward functions set the reward"
        )
    tokens = np.asarray(batch["tokens"].values)
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        sample = np.repeat(packed.sample_index_B, packed.total_lengths_B)[outside]
        raise TrainingError(
            f"token id {int(tokens[outside[0]])} is outside the model's vocabulary of {vocab_size} in samples "
            f"{name_samples(sample)}\n    fix: use the tokenizer that belongs to the model"
        )
    refuse_non_finite("loss_mask", packed.mask_R, packed.sample_index_B[packed.sample_of_R])
    for name in columns:
        column = batch[name]
        values = np.asarray(column.values)
        if column.axis == "response":
            refuse_non_finite(
                name, values[packed.trainable], packed.sample_index_B[packed.sample_of_R[packed.trainable]]
            )
        elif column.axis == "sample":
            refuse_non_finite(name, values, packed.sample_index_B)


def refuse_non_finite(name: str, values: NDArray[np.float32], sample_index: NDArray[np.int64]) -> None:
    """Raise TrainingError naming the samples in which `values` is NaN or inf."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise TrainingError(
            f"{name} is {values[bad[0]]} at {len(bad)} of {len(values)} places, in samples "
            f"{name_samples(sample_index[bad])}\n    fix: find what made it; such a value would spoil every weight"
        )
