"""A batch as flat arrays, and its micro-batches as right-padded tensors."""

# B samples, T padded tokens of a row, N predicted tokens of a micro-batch, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.training_utils.schedule import Samples
from miles.core.train_batch import TrainBatch
from miles.errors import TrainingError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right, which causal attention never looks at, and the tokens to predict from them."""

    input_ids_BT: Tensor
    """Without each sample's last token, which predicts nothing."""
    positions_N: Tensor
    """Where the logits of each predicted token are: the place before it, counted through [B x T]."""
    targets_N: Tensor
    """Ids of the predicted tokens."""
    entries_N: Tensor
    """Where each predicted token is on the batch's response axis [R]."""


class FlatBatch:
    """Tokens and masks of a batch, ready to be cut into micro-batches.

    Only trainable response tokens (mask not 0) are predicted.
    """

    def __init__(
        self,
        tokens: NDArray[np.int64],
        total_lengths_B: NDArray[np.int64],
        response_lengths_B: NDArray[np.int64],
        mask_R: NDArray[np.float32],
        sample_index_B: NDArray[np.int64],
    ) -> None:
        self.total_lengths_B = total_lengths_B
        self.sample_index_B = sample_index_B
        self.mask_R = mask_R
        self._tokens = tokens
        self._token_start_B = np.cumsum(total_lengths_B) - total_lengths_B
        self.response_start_B = np.cumsum(response_lengths_B) - response_lengths_B
        self.sample_of_R = np.repeat(np.arange(len(total_lengths_B)), response_lengths_B)
        shift_B = total_lengths_B - response_lengths_B - self.response_start_B
        self._position_of_R = np.arange(len(mask_R)) + shift_B[self.sample_of_R]
        self.trainable = np.flatnonzero(mask_R != 0)
        """Entries of the response axis that are trained on."""
        self._num_trainable_B = np.bincount(self.sample_of_R[self.trainable], minlength=len(total_lengths_B))
        self._trainable_start_B = np.cumsum(self._num_trainable_B) - self._num_trainable_B
        first = self.trainable[self._position_of_R[self.trainable] == 0]
        if len(first):
            raise TrainingError(
                f"the first token of a sequence cannot be predicted, but is to be trained on in samples "
                f"{name_samples(sample_index_B[self.sample_of_R[first]])}\n    fix: put a token before it, or mask it"
            )

    @classmethod
    def from_batch(cls, batch: TrainBatch) -> FlatBatch:
        """Of a train batch; `sample_index` names the samples in errors."""
        index = batch["sample_index"].values if "sample_index" in batch else range(len(batch))
        return cls(
            np.asarray(batch["tokens"].values),
            batch.total_lengths,
            batch.response_lengths,
            np.asarray(batch["loss_mask"].values),
            np.asarray(index, dtype=np.int64),
        )

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]]) -> FlatBatch:
        """Of bare token sequences, of which every token but the first is predicted."""
        lengths = np.asarray([len(s) for s in sequences], dtype=np.int64)
        tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(s, dtype=np.int64) for s in sequences)])
        response = np.maximum(lengths - 1, 0)
        mask = np.ones(int(response.sum()), dtype=np.float32)
        return cls(tokens, lengths, response, mask, np.arange(len(sequences)))

    @property
    def trainable_B(self) -> NDArray[np.bool_]:
        """Which samples have a trainable token."""
        return self._num_trainable_B > 0

    def micro_batch(self, samples: Samples) -> MicroBatch:
        """The micro-batch of these samples, each with a trainable token; of none, a row of one token from which nothing is predicted."""
        if not len(samples):
            nothing = torch.zeros(0, dtype=torch.int64)
            return MicroBatch(torch.zeros(1, 1, dtype=torch.int64), nothing, nothing, nothing)
        lengths = self.total_lengths_B[samples] - 1
        width = int(lengths.max())
        columns = np.arange(width)
        filled = columns < lengths[:, None]
        input_ids = np.zeros((len(samples), width), dtype=np.int64)
        input_ids[filled] = self._tokens[(self._token_start_B[samples][:, None] + columns)[filled]]
        counts = self._num_trainable_B[samples]
        skip = np.repeat(self._trainable_start_B[samples] - (np.cumsum(counts) - counts), counts)
        entries = self.trainable[skip + np.arange(len(skip))]
        rows = np.repeat(np.arange(len(samples)), counts)
        places = self._position_of_R[entries]
        return MicroBatch(
            torch.from_numpy(input_ids),
            torch.from_numpy(rows * width + places - 1),
            torch.from_numpy(self._tokens[np.repeat(self._token_start_B[samples], counts) + places]),
            torch.from_numpy(entries),
        )


def name_samples(sample_index: NDArray[np.int64], most: int = 10) -> str:
    """`3, 17, 18` or, of many, the first ones and how many more."""
    names = np.unique(sample_index).tolist()
    text = ", ".join(str(n) for n in names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
