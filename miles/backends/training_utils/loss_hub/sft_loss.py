"""Cross-entropy on trainable response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.backends.training_utils.loss_hub.records import LossInputs, LossMetrics, LossOutput


@dataclass(frozen=True, slots=True)
class SftLoss:
    """loss = sum of weights x -logprobs; masked tokens are not read."""

    @property
    def needs_trajectories(self) -> bool:
        """A token's term depends on nothing else."""
        return False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of a micro-batch."""
        weights_N, trainable_N = inputs.weights_N, inputs.weights_N != 0
        loss = -(weights_N * torch.where(trainable_N, inputs.logprobs_N, 0)).sum()

        def metrics() -> LossMetrics:
            weighted = {}
            if inputs.entropy_N is not None:
                weighted["entropy_loss"] = (weights_N * torch.where(trainable_N, inputs.entropy_N, 0)).sum().detach()
            return LossMetrics(weighted=weighted, num_tokens=int(trainable_N.sum()))

        return LossOutput(loss, metrics)
