"""What must hold of how the trainer computes."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.schema import RunConfig
from miles.errors import Issue


def recomputation_is_asked_for_once(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.model.gradient_checkpointing and cfg.train.recompute == "selective":
        yield Issue(
            "train.recompute",
            "--gradient-checkpointing computes whole layers again, --recompute selective all but attention",
            "give one of the two; --gradient-checkpointing is --recompute full",
        )


COMPUTE_CHECKS = (recomputation_is_asked_for_once,)
