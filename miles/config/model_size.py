"""How large a model is, part by part, by its folder's config.json and the headers of its weight files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from miles.utils.model_dtype import model_config

EMBEDDING, HEAD, LAYERS = "embed_tokens.weight", "lm_head.weight", ".layers."
_EXPERT = re.compile(r"\.experts\.[0-9]+\.(gate|up|down)_proj\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of parameters, and the widths that activations have."""

    tensors: tuple[int, ...]
    """Numbers in each tensor, tied ones once; those of a layer's experts together, as the trainer has them."""
    parameters: int
    root: int
    """Parameters outside of all layers."""
    head: int
    """Numbers in the output head, which it may share with the input embedding."""
    layer: int
    """Parameters of the largest layer."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Numbers that wait for the backward pass of a token's MLP: gate, up and their product, of each expert that it is sent to."""
    vocabulary: int
    norms_heads: bool
    """Whether queries and keys are normalised head by head, as in Qwen3."""

    @property
    def query(self) -> int:
        """Numbers in the queries of a token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Numbers in the keys of a token, or in its values."""
        return self.kv_heads * self.head_dim


def model_size(folder: str | Path) -> ModelSize | None:
    """The size of a folder's model: exact where it has weight files, else as its config.json describes it.

    None when config.json lacks what is asked for, as that of another architecture may.
    """
    path = Path(folder)
    config = model_config(path)
    try:
        shapes = _stored_shapes(path) or described_shapes(config)
        return size_of(config, shapes)
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def size_of(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> ModelSize:
    """The size of a model with tensors of these `shapes` by name. Raises KeyError when `config` lacks a width."""
    tied = bool(config.get("tie_word_embeddings", False)) or HEAD not in shapes
    kept: dict[str, int] = {}
    for name, shape in shapes.items():
        if not (tied and name == HEAD):
            whole = _EXPERT.sub(lambda found: f".experts.{'down' if found[1] == 'down' else 'gate_up'}_proj", name)
            kept[whole] = kept.get(whole, 0) + math.prod(shape)
    by_layer: dict[str, int] = {}
    for name, numbers in kept.items():
        if LAYERS in name:
            number = name.partition(LAYERS)[2].partition(".")[0]
            by_layer[number] = by_layer.get(number, 0) + numbers
    embedding = next((numbers for name, numbers in kept.items() if name.endswith(EMBEDDING)), 0)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return ModelSize(
        tensors=tuple(kept.values()),
        parameters=sum(kept.values()),
        root=sum(kept.values()) - sum(by_layer.values()),
        head=embedding if tied else kept[HEAD],
        layer=max(by_layer.values(), default=0),
        layers=len(by_layer),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=_head_dim(config),
        mlp=_mlp(config),
        vocabulary=int(config["vocab_size"]),
        norms_heads=any(name.endswith("q_norm.weight") for name in kept),
    )


def described_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama, Qwen2, Qwen3 or Qwen3-MoE with this config.json. Raises KeyError when a width is missing."""
    hidden, inner, vocabulary = (int(config[name]) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, size = int(config["num_attention_heads"]), _head_dim(config)
    query, key = heads * size, int(config.get("num_key_value_heads") or heads) * size
    kind = config.get("model_type")
    attention = {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
    }
    layer = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    biased = ["q_proj", "k_proj", "v_proj"] if kind == "qwen2" else list(attention)
    if kind == "qwen2" or config.get("attention_bias"):
        layer |= {f"self_attn.{name}.bias": attention[name][:1] for name in biased}
    if kind in ("qwen3", "qwen3_moe"):
        layer |= {f"self_attn.{name}.weight": (size,) for name in ("q_norm", "k_norm")}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    dense = {f"mlp.{name}.weight": shape for name, shape in mlp.items()}
    if kind == "llama" and config.get("mlp_bias"):
        dense |= {f"mlp.{name}.bias": shape[:1] for name, shape in mlp.items()}
    sparse = _sparse_mlp(config, hidden) if kind == "qwen3_moe" else dense
    layer |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(int(config["num_hidden_layers"])):
        is_dense = number in (config.get("mlp_only_layers") or ()) or (number + 1) % config.get(
            "decoder_sparse_step", 1
        )
        tensors = layer | (dense if is_dense else sparse)
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in tensors.items()}
    shapes |= {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        shapes[HEAD] = (vocabulary, hidden)
    return shapes


def _sparse_mlp(config: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    experts, inner = _experts(config), int(config["moe_intermediate_size"])
    one = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    parts = {f"mlp.experts.{n}.{name}.weight": shape for n in range(experts) for name, shape in one.items()}
    return {"mlp.gate.weight": (experts, hidden), **parts}


def _experts(config: dict[str, Any]) -> int:
    """Experts of a layer: transformers 5 writes the second name."""
    return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])


def _mlp(config: dict[str, Any]) -> int:
    dense = 3 * int(config["intermediate_size"])
    if "moe_intermediate_size" not in config:
        return dense
    used, hidden = int(config["num_experts_per_tok"]), int(config["hidden_size"])
    # A token's state goes to each of its experts as a row of its own, and comes back as one.
    sparse = used * (3 * int(config["moe_intermediate_size"]) + 2 * hidden) + _experts(config)
    return max(sparse, dense) if config.get("mlp_only_layers") else sparse


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a folder's safetensors files, by their headers; empty when one is damaged."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size - 8:
                return {}
            header = cast("dict[str, dict[str, Any]]", json.loads(stream.read(length)))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes
