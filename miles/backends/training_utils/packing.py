"""A batch as flat arrays, and its micro-batches as sequences end to end, without padding."""

# B samples, S sequences and T tokens of a micro-batch, N predicted tokens of it, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.training_utils.schedule import Samples
from miles.backends.training_utils.sequence_layout import SequenceLayout, moved
from miles.core.train_batch import TrainBatch
from miles.errors import TrainingError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences end to end, the longest first, and the tokens to predict from them."""

    input_ids_T: Tensor
    """Without each sample's last token, which predicts nothing."""
    position_ids_T: Tensor
    """Place of each token within its own sequence, from 0."""
    layout: SequenceLayout
    positions_N: Tensor
    """Where the logits of each predicted token are on the token axis [T]: the place before it."""
    targets_N: Tensor
    """Ids of the predicted tokens."""
    entries_N: Tensor
    """Where each predicted token is on the batch's response axis [R]; a sample's tokens are neighbours, in order."""

    def to(self, device: torch.device) -> MicroBatch:
        """What a model on `device` reads, there; `entries_N` stays where the batch is."""
        if device.type == "cpu":
            return self
        ids, positions = moved(self.input_ids_T, device), moved(self.position_ids_T, device)
        places, targets = moved(self.positions_N, device), moved(self.targets_N, device)
        return MicroBatch(ids, positions, self.layout.to(device), places, targets, self.entries_N)


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

    def first_trainable(self, sample: int) -> int:
        """Place of a sample's first trainable token among its tokens; it must have one."""
        return int(self._position_of_R[self.trainable[self._trainable_start_B[sample]]])

    def micro_batch(self, samples: Samples) -> MicroBatch:
        """The micro-batch of these samples, each with a trainable token; of none, one token from which nothing is predicted.

        The latter lets a rank without work take part in what ranks do together: it adds 0 to everything.
        """
        if not len(samples):
            nothing = torch.zeros(0, dtype=torch.int64)
            one = torch.zeros(1, dtype=torch.int64)
            return MicroBatch(one, one, SequenceLayout.of([1]), nothing, nothing, nothing)
        samples = samples[np.argsort(-self.total_lengths_B[samples], kind="stable")]
        lengths_S = self.total_lengths_B[samples] - 1
        start_S = np.cumsum(lengths_S) - lengths_S
        position_ids = np.arange(int(lengths_S.sum())) - np.repeat(start_S, lengths_S)
        token_start_S = self._token_start_B[samples]
        input_ids = self._tokens[np.repeat(token_start_S, lengths_S) + position_ids]
        counts_S = self._num_trainable_B[samples]
        skip = np.repeat(self._trainable_start_B[samples] - (np.cumsum(counts_S) - counts_S), counts_S)
        entries = self.trainable[skip + np.arange(len(skip))]
        places = self._position_of_R[entries]
        return MicroBatch(
            torch.from_numpy(input_ids),
            torch.from_numpy(position_ids),
            SequenceLayout.of(lengths_S.tolist()),
            torch.from_numpy(np.repeat(start_S, counts_S) + places - 1),
            torch.from_numpy(self._tokens[np.repeat(token_start_S, counts_S) + places]),
            torch.from_numpy(entries),
        )


def name_samples(sample_index: NDArray[np.int64], most: int = 10) -> str:
    """`3, 17, 18` or, of many, the first ones and how many more."""
    names = np.unique(sample_index).tolist()
    text = ", ".join(str(n) for n in names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
