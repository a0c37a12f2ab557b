"""A tiny Qwen3-MoE folder: two layers of experts and one without."""

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.fast.fsdp.support import VOCAB

EXPERTS, USED, WIDTH = 6, 2, 24


def make_moe_folder(folder: Path, *, seed=0, tied=False, dtype=torch.float32, **changes) -> Path:
    torch.manual_seed(seed)
    changes.setdefault("mlp_only_layers", [1])
    changes.setdefault("num_hidden_layers", 3)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        norm_topk_prob=True,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        **changes,
    )
    Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder
