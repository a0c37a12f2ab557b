"""The policy's weights as the engines hold them: whole, under the names of the model folder, in the engines' data type."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.model import folder_places, hf_tensors
from miles.backends.fsdp_utils.roles import Roles
from miles.config.resources import engine_dtype
from miles.config.schema import RunConfig


class EngineWeights:
    """What engines are sent, and what they must have received."""

    def __init__(self, config: RunConfig, roles: Roles) -> None:
        self._roles = roles
        self._dtype: torch.dtype = getattr(torch, engine_dtype(config))

    def expected(self) -> dict[str, int]:
        """Names and bytes, by the headers of the model folder and the engine's data type."""
        return {name: math.prod(t.shape) * self._dtype.itemsize for name, t in self._roles.stored.items()}

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, gathered from all ranks one at a time; of tied tensors only the first. Collective."""
        policy = self._roles.policy
        for name, tensor in hf_tensors(policy).items():
            whole = _whole(tensor.detach(), self._roles.device, self._dtype).contiguous()
            for folder_name, place in folder_places(policy.hf, {name: tuple(whole.shape)}).items():
                yield folder_name, place.of(whole)


def _whole(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The whole of a sharded tensor in `dtype` on `device`; rounded before it travels between ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.to(device).to(dtype)
    local = tensor.to_local().to(device).to(dtype)
    if dist.get_world_size() == 1:
        return local
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


__all__ = ["EngineWeights"]
