"""What is done to every decoder layer: torch.compile around its attention, and recomputation in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from miles.backends.fsdp_utils.packed_attention import attention_kept
from miles.config.sections.train import Recompute

COMPILED_FORMS = 64
"""Forms of one layer's code that torch.compile keeps: with and without gradient, of policy, reference and critic."""


def decoder_layers(hf: PreTrainedModel) -> Iterator[nn.Module]:
    """The blocks that the model calls indivisible."""
    names = set(hf._no_split_modules or ())
    return (module for module in hf.modules() if type(module).__name__ in names)


def prepare_layers(hf: PreTrainedModel, *, compiled: bool, recompute: Recompute) -> None:
    """Compile each layer, and compute it again in the backward pass in place of keeping what it made.

    Call it before the model is sharded: what FSDP does before and after a layer stays outside of both. `selective` keeps
    what attention needs and gives. Attention itself is never compiled; of the number of tokens a compiled layer does not
    depend.
    """
    if compiled:
        torch._dynamo.config.recompile_limit = COMPILED_FORMS
    for layer in decoder_layers(hf):
        forward: Callable[..., Any] = layer.forward
        if compiled:
            forward = torch.compile(forward, dynamic=True)
        if recompute != "none":
            forward = _recomputed(forward, keeps_attention=recompute == "selective")
        layer.forward = forward


def _recomputed(forward: Callable[..., Any], *, keeps_attention: bool) -> Callable[..., Any]:
    contexts = attention_kept if keeps_attention else noop_context_fn

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in a layer is random, since dropout is off.
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False, **kwargs)

    return run


__all__ = ["decoder_layers", "prepare_layers"]
