"""Attention over sequences end to end, as an attention implementation of transformers: no padding, no [T, T] mask."""

# S sequences and T tokens of a pack, P places of padded rows, H heads, G heads of keys and values, D their size

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from miles.backends.training_utils.sequence_layout import SequenceGroup, SequenceLayout
from miles.errors import TrainingError

NAME = "miles_packed"
KNOWN = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache", "is_causal"}
"""What models hand to their attention beside the tensors that does not change its result here."""
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels of a GPU for rows, the fastest first; the first that can is taken."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def use_packed_attention(hf: PreTrainedModel) -> None:
    """Make `hf` attend within sequences only; from then on its forward needs `sequence_layout`, a `SequenceLayout`."""
    AttentionInterface.register(NAME, packed_attention)
    hf.set_attn_implementation(NAME)


def packed_attention(
    module: nn.Module, query_1HTD: Tensor, key_1GTD: Tensor, value_1GTD: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal softmax attention within each sequence of `sequence_layout`; returns [1, T, H, D]. See `_attend_packed`."""
    found = _attend_packed(module, *map(_tokens_first, (query_1HTD, key_1GTD, value_1GTD)), *args, **kwargs)
    return cast("tuple[Tensor, None]", found)


def _tokens_first(heads_1HTD: Tensor) -> Tensor:
    """[1, T, H, D], end to end in memory as projections leave it, and no view.

    torch.compile brings gradients into the order of what it handed out, by a copy where they are in another; those of
    attention come in the order of its inputs.
    """
    tokens_1THD = heads_1HTD.transpose(1, 2).contiguous()
    return torch.ops.aten._unsafe_view(tokens_1THD, tokens_1THD.shape)


@torch.compiler.disable  # The layout is another in every pack: it would be compiled for each.
def _attend_packed(
    module: nn.Module,
    query_1THD: Tensor,
    key_1TGD: Tensor,
    value_1TGD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_layout: SequenceLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal softmax attention of tokens within each sequence of `sequence_layout`; returns [1, T, H, D].

    With `sliding_window` w a token sees itself and the w - 1 tokens before it. Sequences of like length go side by side
    through torch's attention; on a GPU one kernel that knows the borders does it where that is faster. Raises
    TrainingError when the model wants something else of its attention, such as soft-capping, sinks, dropout or a mask of
    its own.
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
    kept = _kept.get()
    if kept is not None and kept.replays:
        return kept.outputs.popleft().detach().requires_grad_(), None

    def attend() -> Tensor:
        # Squeezed, not indexed: the gradient of an index is written into zeros.
        query_THD, key_TGD, value_TGD = (x.squeeze(0) for x in (query_1THD, key_1TGD, value_1TGD))
        attended_THD = _attend(query_THD, key_TGD, value_TGD, sequence_layout, scaling, sliding_window)
        # In one form, and no view: torch.compile would compile what follows for each form, of it and of what is viewed.
        return torch.ops.aten._unsafe_view(attended_THD.contiguous(), (1, *attended_THD.shape))

    if kept is None:
        return attend(), None
    # These hooks in place of the checkpoint's: what this attention needs in its backward pass stays in memory.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        attended_1THD = attend()
    kept.outputs.append(attended_1THD)
    return attended_1THD, None


class _Kept:
    """Outputs of attention in a part of the model that is run again in the backward pass."""

    def __init__(self) -> None:
        self.outputs: deque[Tensor] = deque()
        self.replays = False


_kept: ContextVar[_Kept | None] = ContextVar("kept", default=None)


def attention_kept() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for a checkpointed forward pass and its repetition, of which the second takes attention from the first."""
    kept = _Kept()
    return _keeping(kept, replays=False), _keeping(kept, replays=True)


@contextmanager
def _keeping(kept: _Kept, *, replays: bool) -> Iterator[None]:
    kept.replays = replays
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def _attend(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    layout: SequenceLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attention of the pack, [T, H, D]."""
    if query_THD.is_cuda and query_THD.dtype in SIXTEEN_BITS:
        cuts = sliding_window is not None and sliding_window < layout.max_length
        if layout.by_borders or cuts:
            return _varlen(query_THD, key_TGD, value_TGD, layout, scaling, sliding_window)
    groups = layout.groups
    if len(groups) == 1:
        return _grouped(query_THD, key_TGD, value_TGD, groups[0], scaling, sliding_window)
    # One split for all groups: its backward pass puts their gradients side by side, where slices would add them up.
    sizes = [group.stop - group.start for group in groups]
    queries, keys, values = (x.split(sizes) for x in (query_THD, key_TGD, value_TGD))
    parts = [
        _grouped(query, key, value, group, scaling, sliding_window)
        for query, key, value, group in zip(queries, keys, values, groups, strict=True)
    ]
    return torch.cat(parts)


class _Padded(torch.autograd.Function):
    """Tokens [T, ...] at their places in padded rows, [P, ...]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gather_P: Tensor, scatter_T: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_T)
        return tokens.index_select(0, gather_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # What padding holds reaches no result, so its gradient is 0, whichever token stands there.
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Unpadded(torch.autograd.Function):
    """The tokens of padded rows [P, ...], end to end, [T, ...]."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, scatter_T: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_T)
        ctx.num_places = len(places)
        return places.index_select(0, scatter_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = grads[0].new_zeros((ctx.num_places, *grads[0].shape[1:]))
        return zeros.index_copy_(0, ctx.saved_tensors[0], grads[0]), None


def take_rows(rows: Tensor, places_N: Tensor) -> Tensor:
    """`rows[places_N]` for places that are all different: the backward pass copies, and adds nothing up."""
    return cast("Tensor", _Unpadded.apply(rows, places_N))


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
        if group.gather is not None:
            tokens = cast("Tensor", _Padded.apply(tokens, group.gather, group.scatter))
        return tokens.unflatten(0, (group.rows, group.width)).transpose(1, 2)

    window = None
    if sliding_window is not None and sliding_window < group.width:
        places = torch.arange(group.width, device=query_THD.device)
        behind = places[:, None] - places
        window = (behind >= 0) & (behind < sliding_window)
    with _kernels(query_THD):
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
    return tokens if group.scatter is None else take_rows(tokens, group.scatter)


def _kernels(tensor: Tensor) -> AbstractContextManager[Any]:
    return sdpa_kernel(KERNELS, set_priority=True) if tensor.is_cuda else nullcontext()


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


__all__ = ["attention_kept", "packed_attention", "take_rows", "use_packed_attention"]
