"""The turns of a trajectory that is several samples must come in the order in which they were played."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miles.backends.training_utils.packing import FlatBatch, name_samples
from miles.core.train_batch import TrainBatch
from miles.errors import TrainingError


def require_turn_order(batch: TrainBatch, packed: FlatBatch, trajectory_B: NDArray[np.int64]) -> None:
    """Raise TrainingError, naming the samples, when a trajectory's samples are not in the order of their turns.

    Discounted returns run from sample to sample in the order of the batch. Of two neighbours in it of which one's tokens
    are the beginning of the other's, the first must have the earlier first trainable token. Samples that share no such
    beginning, as after a summary of the context, are taken as they come; those without a trainable token are left out.
    """
    order = np.flatnonzero(packed.trainable_B)
    order = order[np.argsort(trajectory_B[order], kind="stable")]
    tokens = batch["tokens"]
    for first, second in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        if trajectory_B[first] != trajectory_B[second]:
            continue
        one, other = np.asarray(tokens.row(first)), np.asarray(tokens.row(second))
        shared = min(len(one), len(other))
        is_later = packed.first_trainable(first) > packed.first_trainable(second)
        if is_later and np.array_equal(one[:shared], other[:shared]):
            earlier, later = packed.sample_index_B[second], packed.sample_index_B[first]
            raise TrainingError(
                f"samples {name_samples(packed.sample_index_B[[first, second]])} are one trajectory, and sample {earlier}, the "
                f"earlier turn by its tokens, comes after sample {later}: returns would be discounted backwards"
                "\n    fix: let the generate function return the samples of a trajectory in the order of their turns"
            )
