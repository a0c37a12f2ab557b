"""Passes over a few tokens before the first batch: what torch compiles then is compiled while the engines start."""

from __future__ import annotations

import numpy as np
import torch

from miles.backends.fsdp_utils.model import release_gathered
from miles.backends.fsdp_utils.roles import Roles
from miles.backends.training_utils.packing import FlatBatch

PACKS: tuple[tuple[int, ...], ...] = ((64,) * 32, (33, 17) * 41)
"""Lengths of sequences in tokens: some that a GPU's attention takes as rows, and some that it takes by their borders. Together
they are enough tokens for a compiler to plan for many, and few enough to need little memory."""


def warm_up(roles: Roles) -> None:
    """Run policy and reference without gradient, and the policy forward and backward; no weight changes. Collective.

    Layers are compiled for any number of tokens, so what is compiled here serves all batches.
    """
    device = roles.device
    for lengths in PACKS:
        sequences = [[n % roles.policy.vocab_size for n in range(length)] for length in lengths]
        part = FlatBatch.from_sequences(sequences).micro_batch(np.arange(len(lengths))).to(device)
        with torch.no_grad():
            for model in (roles.policy, roles.reference):
                if model is not None:
                    model(part, 1.0)
                    release_gathered(model)
        logprobs_N, entropy_N = roles.policy(part, 1.0, entropy=True)
        (0.0 * (logprobs_N + entropy_N).sum()).backward()
    roles.optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.empty_cache()


__all__ = ["warm_up"]
