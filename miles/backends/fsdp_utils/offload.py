"""Tensors of a trainer that wait in the CPU's memory while something else has the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils.model import DecoderModel, release_gathered
from miles.backends.fsdp_utils.optimizer import ShardedAdamW

Part = Literal["weights", "optimizer"]
"""What can leave the GPU by itself: weights of policy, reference and critic; moments."""


class Waiting:
    """Moves the memory of tensors out and back in. Tensors and views of them stay what they are, but hold nothing meanwhile."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._host: dict[int, Tensor] = {}

    @property
    def is_out(self) -> bool:
        """Whether there is something to bring back."""
        return bool(self._held)

    def out(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory of `tensors` to the CPU, and free it on the device. Does nothing when it is out already.

        Host memory is pinned, for speed, and kept for the next time. Memory that is not torch's own, as a CPU run maps from
        the model's files, stays where it is.
        """
        if self.is_out:
            return
        storages = {s._cdata: s for s in map(_storage, tensors) if s.nbytes() and s.resizable()}
        for key, storage in storages.items():
            host = self._host.get(key)
            if host is None or host.numel() != storage.nbytes():
                pinned = storage.device.type == "cuda"
                host = self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            host.copy_(_bytes(storage), non_blocking=True)
            self._held.append((storage, host))
        self._host = {key: self._host[key] for key in storages}
        _wait(self._held)
        for storage, _ in self._held:
            storage.resize_(0)

    def back(self) -> None:
        """Bring back what `out` moved, bit by bit."""
        for storage, host in self._held:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        _wait(self._held)
        self._held = []


def weights_of(model: DecoderModel) -> Iterator[Tensor]:
    """A sharded model's parameters; whole ones that a pass left are given up."""
    release_gathered(model)
    yield from model.parameters()


def moments_of(optimizer: ShardedAdamW) -> Iterator[Tensor]:
    """An optimizer's moments."""
    yield from optimizer.moments().values()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(held: list[tuple[torch.UntypedStorage, Tensor]]) -> None:
    if any(storage.device.type == "cuda" for storage, _ in held):
        torch.cuda.synchronize()


__all__ = ["Part", "Waiting", "moments_of", "weights_of"]
