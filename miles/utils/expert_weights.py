"""Where the tensors of a model folder lie in a module that keeps the experts of a layer in one tensor."""

# E experts of a layer, I their intermediate size, D hidden size

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder's tensor in a module's: all of `source`, or rows `start` to `stop` of one expert's part of it."""

    source: str
    shape: tuple[int, ...]
    """Of the folder's tensor."""
    expert: int | None = None
    start: int = 0

    @property
    def stop(self) -> int:
        """The row after the last, of an expert's part."""
        return self.start + self.shape[0]

    def of(self, whole: Tensor) -> Tensor:
        """The folder's tensor as a view of the module's whole one; it is contiguous when that is."""
        return whole if self.expert is None else whole[self.expert, self.start : self.stop]


def places_as_named(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Of a folder that names tensors as the module does: `shapes` are of the module's tensors by name."""
    return {name: Place(name, shape) for name, shape in shapes.items()}


def places_of_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Of a folder with tensors for each expert and a module with `experts.gate_up_proj` [E, 2 I, D] and `experts.down_proj` [E, D, I].

    Those of the folder are `experts.N.gate_proj.weight` [I, D], `experts.N.up_proj.weight` [I, D] and
    `experts.N.down_proj.weight` [D, I]; all other names are the module's.
    """
    found: dict[str, Place] = {}
    for name, shape in shapes.items():
        if name.endswith(GATE_UP):
            half = shape[1] // 2
            for expert in range(shape[0]):
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}."
                found[f"{prefix}gate_proj.weight"] = Place(name, (half, shape[2]), expert)
                found[f"{prefix}up_proj.weight"] = Place(name, (half, shape[2]), expert, half)
        elif name.endswith(DOWN):
            for expert in range(shape[0]):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = Place(name, shape[1:], expert)
        else:
            found[name] = Place(name, shape)
    return found


__all__ = ["Place", "places_as_named", "places_of_experts"]
