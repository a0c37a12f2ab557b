"""The model that is trained on: the run's own, or a tiny one of its family."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from miles.backends.fsdp_utils.hf_folder import stored_tensors
from miles.backends.fsdp_utils.model import ties_embeddings

FAMILY = "qwen3"
"""What is made when the run names no model."""
KEPT = ("tie_word_embeddings", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "norm_topk_prob")
"""Settings of config.json that a tiny model takes over."""
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}

TINY_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""The same of a family whose layers have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsed:
    """Folders of the policy and its reference, and what they are."""

    folder: str
    reference: str | None
    about: str


def choose_model(
    hf_checkpoint: str, reference: str | None, *, max_parameters: int, work: Path, seed: int
) -> ModelUsed:
    """The run's own model when it has at most `max_parameters`; otherwise policy and reference are made in `work`.

    Raises CheckpointError when the folder cannot be read.
    """
    if not hf_checkpoint:
        return _make(
            {"model_type": FAMILY}, work, seed, f"a tiny {FAMILY} made here, since no --hf-checkpoint is given"
        )
    stored = stored_tensors(hf_checkpoint, tied=ties_embeddings(hf_checkpoint))
    count = sum(math.prod(tensor.shape) for tensor in stored.values())
    if count <= max_parameters:
        return ModelUsed(folder=hf_checkpoint, reference=reference, about=f"{hf_checkpoint}, {count:,} parameters")
    config = json.loads((Path(hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
    why = f"since {hf_checkpoint} has {count:,} parameters, more than --max-parameters {max_parameters:,}"
    return _make(config, work, seed, f"a tiny {config['model_type']} made here, {why}")


def _make(like: dict[str, Any], work: Path, seed: int, about: str) -> ModelUsed:
    folders = [work / "policy", work / "reference"]
    has_experts = "num_experts_per_tok" in like
    settings = TINY | (TINY_EXPERTS if has_experts else {}) | {name: like[name] for name in KEPT if name in like}
    config = AutoConfig.for_model(like["model_type"], **settings)
    for number, folder in enumerate(folders):
        torch.manual_seed(2 * seed + number)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return ModelUsed(folder=str(folders[0]), reference=str(folders[1]), about=about)
