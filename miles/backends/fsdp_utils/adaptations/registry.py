"""The adaptation of each architecture, by `model_type` of config.json."""

from __future__ import annotations

from miles.backends.fsdp_utils.adaptations.adaptation import Adaptation
from miles.backends.fsdp_utils.adaptations.specs import qwen3, qwen3_moe

PLAIN = Adaptation()
"""Of an architecture without a spec: stored as it is run. A model that it does not fit is refused at load."""
ADAPTATIONS = {"qwen3": qwen3.ADAPTATION, "qwen3_moe": qwen3_moe.ADAPTATION}


def adaptation_of(model_type: str) -> Adaptation:
    """What `model_type` needs; `PLAIN` where nothing is known of it."""
    return ADAPTATIONS.get(model_type, PLAIN)


__all__ = ["ADAPTATIONS", "PLAIN", "adaptation_of"]
