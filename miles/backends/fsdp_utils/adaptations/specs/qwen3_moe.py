"""Qwen3-MoE: stored with tensors for each expert, run with the experts of a layer in two tensors, by grouped products."""

from __future__ import annotations

from typing import Any

from miles.backends.fsdp_utils.adaptations.adaptation import Adaptation
from miles.utils.expert_weights import places_of_experts


def _experts_used(config: Any) -> float:
    return config.num_experts_per_tok / config.num_experts


ADAPTATION = Adaptation(
    layer_classes=lambda hf: ("Qwen3MoeDecoderLayer",),
    places=places_of_experts,
    # Tokens sorted by expert and one product for all of them, torch's grouped_mm; its backward pass is two of these.
    load_options={"experts_implementation": "grouped_mm"},
    experts_used=_experts_used,
)
