"""In what a model of this size may be trained, by the model's files and the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from miles.config.resources import num_train_ranks, resolved_device
from miles.config.schema import RunConfig
from miles.errors import Issue
from miles.utils.model_dtype import num_parameters

SMALL = 300_000_000
"""Parameters that a GPU may train in fp32; larger models would take several times longer than in bf16, by mistake most likely."""


def large_models_train_in_16_bits(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.train.bf16 or not num_train_ranks(cfg) or resolved_device(cfg) != "cuda":
        return
    size = num_parameters(Path(cfg.model.hf_checkpoint))
    if size > SMALL:
        yield Issue(
            "train.bf16",
            f"a model of {_short(size)} parameters would be trained in fp32, on a GPU several times slower than in bf16",
            "--bf16; master weights, moments and gradient sums stay fp32",
        )


def _short(number: int) -> str:
    digits = math.floor(math.log10(number)) // 3
    return f"{number / 1000**digits:.3g}{['', ' thousand', ' million', ' billion', ' trillion'][digits]}"


PRECISION_CHECKS = (large_models_train_in_16_bits,)
