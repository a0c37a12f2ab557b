"""Which parts of a trainer rank are on its device, and which wait in the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from miles.backends.fsdp_utils.offload import Part, Waiting, moments_of, weights_of
from miles.backends.fsdp_utils.roles import Roles
from miles.errors import TrainingError


class RolesMemory:
    """Moves the memory of all roles out and back in, by parts."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._waiting: dict[Part, Waiting] = {"weights": Waiting(), "optimizer": Waiting()}

    def offload(self, *parts: Part) -> None:
        """Move these parts to the CPU's memory, all of them when none is named, and give the GPU's back.

        What is in the CPU's memory anyway stays there, and can be used.
        """
        for part in parts or tuple(self._waiting):
            here = [tensor for tensor in self._memory(part) if tensor.device.type == self._roles.device.type]
            self._waiting[part].out(here)
        if self._roles.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, *parts: Part) -> None:
        """Bring these parts back, all of them when none is named."""
        for part in parts or tuple(self._waiting):
            self._waiting[part].back()

    def require(self, *parts: Part) -> None:
        """Raise TrainingError when one of these parts is not on the device."""
        for part in parts:
            if self._waiting[part].is_out:
                raise TrainingError(f"the trainer's {part} are in the CPU's memory\n    fix: call onload() before")

    def _memory(self, part: Part) -> Iterator[Tensor]:
        roles = self._roles
        if part == "optimizer":
            yield from moments_of(roles.optimizer)
        else:
            yield from weights_of(roles.policy)
            if roles.reference is not None:
                yield from weights_of(roles.reference)
        if roles.critic is not None:
            yield from roles.critic.memory(part)


__all__ = ["RolesMemory"]
