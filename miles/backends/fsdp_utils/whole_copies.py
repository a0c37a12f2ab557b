"""Weights of a rank that is alone: nothing to gather, so passes compute with copies that are rounded all at once."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

ALIGNMENT = 128
"""Numbers that a copy's start is a multiple of: kernels read 16 bytes at a time."""


class WholeCopies:
    """Does for one rank what FSDP does for several, bit for bit, in a few operations for all weights in place of several each.

    Between passes a model's parameters are DTensors in fp32 on a mesh of one rank. A forward pass puts copies in `dtype`
    into their places, whose gradients are added to those of the parameters, in fp32, when a backward pass ends; then the
    copies' memory is given up. Why: docs/decisions/012-copies-on-one-rank.md.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        """Take over all parameters of `model`, which lie whole on the device of `mesh`, one rank's."""
        assert mesh.size() == 1, mesh
        self.keeps_after_backward = False
        """Whether the next backward passes leave the copies in place, for a forward pass with the same weights."""
        found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                found.setdefault(id(parameter), (parameter, []))[1].append((module, name))
        self._places = [places for _, places in found.values()]
        self._weights = [_on_mesh(parameter, mesh) for parameter, _ in found.values()]
        with torch.no_grad():
            self._locals = [_local(weight) for weight in self._weights]
        sizes = [-(-local.numel() // ALIGNMENT) * ALIGNMENT for local in self._locals]
        memory = torch.empty(sum(sizes), dtype=dtype, device=self._locals[0].device)
        self._copies = [
            nn.Parameter(part[: local.numel()].view(local.shape), requires_grad=weight.requires_grad)
            for part, local, weight in zip(memory.split(sizes), self._locals, self._weights, strict=True)
        ]
        self._targets = [copy.data for copy in self._copies]
        self._storage, self._bytes = memory.untyped_storage(), memory.nbytes
        self._are_in_place = True
        self._ends_backward = False
        self.release()
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def release(self) -> None:
        """Put the parameters back into their places, and give up the copies; the next forward pass makes them anew."""
        if not self._are_in_place:
            return
        self._put(self._weights)
        self._storage.resize_(0)
        self._are_in_place = False

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self._places, strict=True):
            for module, name in places:
                module._parameters[name] = parameter

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if self._ends_backward:  # one that failed has not ended
            self._ends_backward = False
            for copy in self._copies:
                copy.grad = None
        if self._are_in_place:
            return
        self._storage.resize_(self._bytes)
        self._are_in_place = True
        torch._foreach_copy_(self._targets, self._locals)  # pyright: ignore[reportPrivateImportUsage]
        self._put(self._copies)

    def _after_forward(self, model: nn.Module, inputs: Any, outputs: Tensor | tuple[Tensor, ...]) -> None:
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            if output.requires_grad:
                output.register_hook(self._begin_backward)

    def _begin_backward(self, grad: Tensor) -> None:
        if not self._ends_backward:
            self._ends_backward = True
            Variable._execution_engine.queue_callback(self._after_backward)

    @torch.no_grad()
    def _after_backward(self) -> None:
        self._ends_backward = False
        first: list[tuple[nn.Parameter, Tensor]] = []
        sums: list[Tensor] = []
        addends: list[Tensor] = []
        for weight, copy in zip(self._weights, self._copies, strict=True):
            if copy.grad is None:
                continue
            if weight.grad is None:
                first.append((weight, copy.grad))
            else:
                sums.append(_local(weight.grad))
                addends.append(copy.grad)
            copy.grad = None
        if first:
            wide = [torch.empty_like(grad, dtype=torch.float32) for _, grad in first]
            torch._foreach_copy_(wide, [grad for _, grad in first])  # pyright: ignore[reportPrivateImportUsage]
            for (weight, _), grad in zip(first, wide, strict=True):
                weight.grad = DTensor(grad, cast(Any, weight)._spec, requires_grad=False)
        if sums:
            torch._foreach_add_(sums, addends)  # pyright: ignore[reportPrivateImportUsage]
        if not self.keeps_after_backward:
            self.release()


def _on_mesh(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    whole = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


__all__ = ["WholeCopies"]
