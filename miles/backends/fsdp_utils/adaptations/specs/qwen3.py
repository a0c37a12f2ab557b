"""Qwen3: a dense decoder that is stored as transformers runs it."""

from miles.backends.fsdp_utils.adaptations.adaptation import Adaptation

ADAPTATION = Adaptation(layer_classes=lambda hf: ("Qwen3DecoderLayer",))
