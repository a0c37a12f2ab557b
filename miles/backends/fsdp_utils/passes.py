"""Passes without gradient: log-probs of a rank's micro-batches, of all ranks together, and of sequences."""

# R response tokens of all samples end to end, N predicted tokens of a micro-batch

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles.backends.fsdp_utils.model import PolicyModel, release_gathered
from miles.backends.fsdp_utils.roles import Roles
from miles.backends.training_utils.checks import refuse_non_finite
from miles.backends.training_utils.packing import FlatBatch, MicroBatch
from miles.backends.training_utils.schedule import split_into_micro_batches
from miles.config.schema import RunConfig


class Passes:
    """Scores tokens with the policy and the reference."""

    def __init__(self, config: RunConfig, roles: Roles) -> None:
        self._roles = roles
        self._scores_entropy = config.algorithm.use_rollout_entropy
        self._max_tokens = config.train.max_tokens_per_gpu
        self.temperature = 1.0 if config.algorithm.loss_type == "sft_loss" else config.rollout.temperature
        """What logits are divided by in training."""

    @torch.no_grad()
    def forward_only(
        self, model: PolicyModel, parts: Sequence[MicroBatch], num_entries: int, entropy_R: Tensor | None = None
    ) -> Tensor:
        """Log-probs of this rank's predicted tokens on the response axis [R], 0 elsewhere; fills `entropy_R` likewise."""
        # Nothing waits for a result before every part is on its way.
        found = [model(part, self.temperature, entropy=entropy_R is not None) for part in parts]
        release_gathered(model)
        logprobs_R = torch.zeros(num_entries)
        for part, (logprobs_N, *entropy) in zip(parts, found, strict=True):
            logprobs_R[part.entries_N] = logprobs_N.cpu()
            if entropy_R is not None:
                entropy_R[part.entries_N] = entropy[0].cpu()
        return logprobs_R

    def batch(
        self,
        model: PolicyModel,
        parts: Sequence[MicroBatch],
        packed: FlatBatch,
        name: str,
        metrics: dict[str, float],
        timer: str,
    ) -> Tensor:
        """Log-probs of all trainable tokens on the response axis [R], 0 elsewhere, the same on all ranks; none is NaN or inf.

        Where the run asks for it, the policy's entropy at these tokens joins the metrics. Collective.
        """
        started = time.perf_counter()
        scores_entropy = self._scores_entropy and model is self._roles.policy
        entropy_R = torch.zeros(len(packed.mask_R)) if scores_entropy else None
        logprobs_R = gathered(self.forward_only(model, parts, len(packed.mask_R), entropy_R), packed, name)
        if entropy_R is not None:
            entropy_R = gathered(entropy_R, packed, "the policy's entropy")
            metrics["train/rollout_entropy"] = float(entropy_R[torch.from_numpy(packed.trainable)].mean())
        metrics[f"perf/{timer}_time"] = time.perf_counter() - started
        return logprobs_R

    @torch.no_grad()
    def sequences(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-probabilities of tokens 1..T-1 of each sequence under softmax(logits / temperature), by the policy.

        Collective; every rank scores all.
        """
        policy = self._roles.policy
        packed = FlatBatch.from_sequences(sequences)
        logprobs_R = torch.zeros(len(packed.mask_R))
        for samples in split_into_micro_batches(
            np.flatnonzero(packed.trainable_B), packed.total_lengths_B, self._max_tokens
        ):
            part = packed.micro_batch(samples).to(self._roles.device)
            (logprobs_N,) = policy(part, temperature)
            logprobs_R[part.entries_N] = logprobs_N.cpu()
        release_gathered(policy)
        starts = packed.response_start_B.tolist()
        return [logprobs_R[s : s + max(0, len(q) - 1)].tolist() for s, q in zip(starts, sequences, strict=True)]


def gathered(scores_R: Tensor, packed: FlatBatch, name: str) -> Tensor:
    """Scores of all ranks together, in place. Raises TrainingError, naming samples, when one is NaN or infinite."""
    if dist.get_world_size() > 1:
        dist.all_reduce(scores_R)
    samples = packed.sample_index_B[packed.sample_of_R[packed.trainable]]
    refuse_non_finite(name, scores_R.numpy()[packed.trainable], samples)
    return scores_R


__all__ = ["Passes", "gathered"]
