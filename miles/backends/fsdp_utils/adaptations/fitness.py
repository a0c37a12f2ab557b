"""Models that the trainer cannot pack or wrap, told from their config and modules, with the way out."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from miles.backends.fsdp_utils.adaptations.registry import ADAPTATIONS, adaptation_of
from miles.errors import CheckpointError

ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers, by `layer_types` of config.json, in which tokens are mixed by attention alone."""


def require_attention_only(path: Path, config: PreTrainedConfig) -> None:
    """Raise CheckpointError when config.json lists layers that mix tokens otherwise than by causal attention."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if others := sorted(map(str, kinds - ATTENTION)):
        raise CheckpointError(
            f"{path}: layers of {config.model_type} are of kind {', '.join(others)}, whose state would run on from one "
            f"sequence of a pack into the next; only {' and '.join(sorted(ATTENTION))} know borders{_way_out()}"
        )


def require_layers(path: Path, hf: PreTrainedModel) -> None:
    """Raise CheckpointError when the decoder layers are not found, or attention cannot be exchanged."""
    name, count = type(hf).__name__, hf.config.get_text_config().num_hidden_layers
    if not hf._can_set_attn_implementation():
        raise CheckpointError(
            f"{path}: {name} brings attention of its own that cannot be exchanged, and would see across the borders of "
            f"packed sequences{_way_out()}"
        )
    found = adaptation_of(hf.config.model_type).decoder_layers(hf)
    if len(found) != count:
        raise CheckpointError(
            f"{path}: {name} has {count} layers by its config.json, and {len(found)} of the kind that transformers calls "
            f"indivisible (_no_split_modules: {', '.join(sorted(hf._no_split_modules or ())) or 'none'}), so the trainer "
            f"does not know what to shard and recompute as one{_way_out()}"
        )


def _way_out() -> str:
    return (
        f"\n    fix: choose a model of a type with an adaptation ({', '.join(sorted(ADAPTATIONS))}), or a plain decoder such "
        "as llama or qwen2"
    )


__all__ = ["require_attention_only", "require_layers"]
