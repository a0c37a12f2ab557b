"""How the trainer computes, where it follows from several settings."""

from __future__ import annotations

from miles.config.resources import num_train_ranks, resolved_device
from miles.config.schema import RunConfig
from miles.config.sections.train import Recompute


def recompute_of(cfg: RunConfig) -> Recompute:
    """What the backward pass computes again: as set, or everything with `--gradient-checkpointing`."""
    return "full" if cfg.model.gradient_checkpointing else cfg.train.recompute


def compiles_layers(cfg: RunConfig) -> bool:
    """Whether decoder layers are compiled: as set, or on a GPU."""
    set_to = cfg.train.compile_layers
    return resolved_device(cfg) == "cuda" if set_to is None else set_to


def keeps_gathered(cfg: RunConfig) -> bool:
    """Whether a rank keeps gathered weights from the forward to the backward pass: alone on a GPU, unless memory matters more."""
    saves_memory = recompute_of(cfg) == "full" or cfg.train.cpu_offload
    return resolved_device(cfg) == "cuda" and num_train_ranks(cfg) == 1 and not saves_memory
