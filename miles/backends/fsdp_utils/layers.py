"""What is done to every decoder layer: torch.compile around its attention, and recomputation in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from miles.backends.fsdp_utils.adaptations.registry import adaptation_of
from miles.backends.fsdp_utils.packed_attention import attention_kept
from miles.config.sections.train import Recompute

COMPILED_FORMS = 64
"""Forms of one layer's code that torch.compile keeps: with and without gradient, of policy, reference and critic."""

INDUCTOR: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction_non_strict_mode": True}
"""Without it a backward pass of many tokens would be compiled anew where one of few was compiled before."""


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, in the model's order."""
    return adaptation_of(hf.config.model_type).decoder_layers(hf)


def prepare_layers(hf: PreTrainedModel, *, compiled: bool, recompute: Recompute) -> None:
    """Compile each layer, and compute it again in the backward pass in place of keeping what it made.

    Call it before the model is sharded: what FSDP does before and after a layer stays outside of both. `selective` keeps
    what attention needs and gives. Attention itself is never compiled; of the number of tokens a compiled layer does not
    depend.
    """
    if compiled:
        torch._dynamo.config.recompile_limit = COMPILED_FORMS
        # Two graphs a layer in place of four: one up to attention and one from there, whichever module calls attention.
        torch._dynamo.config.nested_graph_breaks = True
    for layer in decoder_layers(hf):
        forward: Callable[..., Any] = layer.forward
        if compiled:
            forward = _of_views(torch.compile(forward, dynamic=True, options=INDUCTOR))
        if recompute != "none":
            forward = _recomputed(forward, keeps_attention=recompute == "selective")
        layer.forward = forward


def _of_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of hidden states that are always a view: FSDP makes them one for the first layer of what it gathers together."""

    def run(hidden_1TD: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(hidden_1TD if hidden_1TD._is_view() else hidden_1TD.view_as(hidden_1TD), *args, **kwargs)

    return run


def _recomputed(forward: Callable[..., Any], *, keeps_attention: bool) -> Callable[..., Any]:
    contexts = attention_kept if keeps_attention else noop_context_fn

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in a layer is random, since dropout is off.
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False, **kwargs)

    return run


__all__ = ["decoder_layers", "prepare_layers"]
