"""Cross-entropy on trainable response tokens."""

from __future__ import annotations

import torch

from miles.backends.training_utils.loss_hub.records import LossInputs, LossOutput


def sft_loss(inputs: LossInputs) -> LossOutput:
    """loss = sum of weights x -logprobs; masked tokens are not read."""
    weights_N, trainable_N = inputs.weights_N, inputs.weights_N != 0
    logprobs_N = torch.where(trainable_N, inputs.logprobs_N, torch.zeros_like(inputs.logprobs_N))
    entropy_N = torch.where(trainable_N, inputs.entropy_N, torch.zeros_like(inputs.entropy_N))
    return LossOutput(
        loss=-(weights_N * logprobs_N).sum(),
        weighted={"entropy": (weights_N * entropy_N).sum().detach()},
        num_tokens=int(trainable_N.sum()),
    )
