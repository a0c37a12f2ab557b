"""Attention over sequences end to end, as an attention implementation of transformers: no padding, no [T, T] mask."""

# S sequences and T tokens of a pack, H heads, G heads of keys and values, D their size

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from miles.backends.training_utils.packing import SequenceGroup, SequenceLayout
from miles.errors import TrainingError

NAME = "miles_packed"
KNOWN = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache", "is_causal"}
"""What models hand to their attention beside the tensors that does not change its result here."""


def use_packed_attention(hf: PreTrainedModel) -> None:
    """Make `hf` attend within sequences only; from then on its forward needs `sequence_layout`, a `SequenceLayout`."""
    AttentionInterface.register(NAME, packed_attention)
    hf.set_attn_implementation(NAME)


def packed_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_layout: SequenceLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal softmax attention within each sequence of `sequence_layout`; returns [1, T, H, D].

    With `sliding_window` w a token sees itself and the w - 1 tokens before it. On a GPU it is one kernel that knows the
    borders; elsewhere sequences of like length go side by side through torch's attention. Raises TrainingError when the
    model wants something else of its attention, such as soft-capping, sinks, dropout or a mask of its own.
    """
    refused = {name for name, value in others.items() if value is not None and name not in KNOWN}
    refused |= {
        name for name, value in (("attention_mask", attention_mask), ("dropout", dropout or None)) if value is not None
    }
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        refused.add("is_causal=False")
    if sequence_layout is None or refused:
        found = f"wants {', '.join(sorted(refused))} of it" if refused else "does not hand it the borders of sequences"
        raise TrainingError(
            f"{type(module).__name__} cannot attend to packed sequences: it {found}"
            "\n    fix: use a model with plain causal attention, such as Llama, Qwen2 or Qwen3"
        )
    query_THD, key_TGD, value_TGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
    if query_THD.is_cuda:
        return _varlen(query_THD, key_TGD, value_TGD, sequence_layout, scaling, sliding_window).unsqueeze(0), None
    parts = [_grouped(query_THD, key_TGD, value_TGD, g, scaling, sliding_window) for g in sequence_layout.groups]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).unsqueeze(0), None


def _grouped(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    group: SequenceGroup,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attention of one group of sequences, as rows padded on the right: what is behind a token does not reach it."""

    def rows(tokens: Tensor) -> Tensor:
        part = tokens[group.start : group.stop]
        if group.gather is not None:
            part = part.index_select(0, group.gather)
        return part.unflatten(0, (group.rows, group.width)).transpose(1, 2)

    window = None
    if sliding_window is not None and sliding_window < group.width:
        places = torch.arange(group.width)
        behind = places[:, None] - places
        window = (behind >= 0) & (behind < sliding_window)
    attended = F.scaled_dot_product_attention(
        rows(query_THD),
        rows(key_TGD),
        rows(value_TGD),
        attn_mask=window,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
    )
    tokens = attended.transpose(1, 2).flatten(0, 1)
    return tokens if group.scatter is None else tokens.index_select(0, group.scatter)


def _varlen(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    layout: SequenceLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attention of the whole pack by one kernel of a GPU, which reads the borders."""
    from torch.nn.attention.varlen import varlen_attn

    if query_THD.dtype not in (torch.bfloat16, torch.float16):
        raise TrainingError(
            f"packed attention on a GPU computes in 16 bits, and this model in {query_THD.dtype}\n    fix: --bf16"
        )
    # torch 2.11 wants as many heads of keys and values as of queries.
    repeats = query_THD.shape[1] // key_TGD.shape[1]
    attended = varlen_attn(
        query_THD,
        key_TGD.repeat_interleave(repeats, dim=1),
        value_TGD.repeat_interleave(repeats, dim=1),
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
    )
    return cast("Tensor", attended)


__all__ = ["packed_attention", "use_packed_attention"]
