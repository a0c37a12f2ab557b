"""What a spec says of an architecture, and what is taken of one without a spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from miles.utils.expert_weights import Place, places_as_named

Shapes = Mapping[str, tuple[int, ...]]


def indivisible(hf: PreTrainedModel) -> Iterable[str]:
    """Names of the classes that transformers says to keep on one device."""
    return hf._no_split_modules or ()


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How the trainer handles models of one architecture."""

    layer_classes: Callable[[PreTrainedModel], Iterable[str]] = indivisible
    """Names of the classes of decoder layers: what is compiled, recomputed and sharded as one."""
    places: Callable[[Shapes], dict[str, Place]] = places_as_named
    """The folder's tensors by name, given names and shapes of the module's."""
    load_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `from_pretrained` is told beside what holds for all."""
    experts_used: Callable[[Any], float] = lambda config: 1.0
    """Share of the experts of a layer that a token goes through, by the model's config."""

    def decoder_layers(self, hf: PreTrainedModel) -> list[nn.Module]:
        """The decoder layers, in the model's order."""
        names = set(self.layer_classes(hf))
        return [module for module in hf.modules() if type(module).__name__ in names]


__all__ = ["Adaptation", "Shapes"]
