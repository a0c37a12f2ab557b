"""The wire of a tensor update of SGLang: a flattened bucket that a process on the same GPU maps by a CUDA IPC handle.

SGLang reads a pickle, of which it accepts names of torch and of the standard library; the borders of the tensors travel
as plain namespaces with the attributes that it reads. So the trainer imports nothing of SGLang.
"""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

_ALIGN = 16
"""Bytes at whose multiples tensors begin, so that each can be viewed as its own type wherever it comes."""
_DEVICE_ARGUMENT = 6
"""Which argument of torch's rebuild function is the device: SGLang also takes its UUID there, since the two processes may
number their GPUs otherwise."""


class IpcBucket:
    """A bucket in the trainer's GPU memory, which engines map while `close` has not been called."""

    def __init__(self, flat: Tensor, entries: list[SimpleNamespace]) -> None:
        self._flat: Tensor | None = flat
        self._entries = entries

    def payload(self) -> str:
        """A new handle of the bucket: torch counts the processes that map it by handle, so each needs its own."""
        assert self._flat is not None
        return base64.b64encode(
            pickle.dumps({"flattened_tensor": _Handle(self._flat), "metadata": self._entries})
        ).decode()

    def close(self) -> None:
        """Give the memory back, once every engine has copied it; a second call does nothing."""
        if self._flat is not None:
            on_gpu, self._flat = self._flat.is_cuda, None
            if on_gpu:
                torch.cuda.ipc_collect()


class CudaIpcCodec:
    """Named tensors as one flattened bucket in the memory of their GPU."""

    def encode(self, named_tensors: list[tuple[str, Tensor]]) -> IpcBucket:
        """Copy the tensors of one bucket end to end, in their order and type."""
        entries: list[SimpleNamespace] = []
        pieces: list[Tensor] = []
        end = 0
        for name, tensor in named_tensors:
            if gap := -end % _ALIGN:
                pieces.append(torch.zeros(gap, dtype=torch.uint8, device=tensor.device))
            piece = tensor.detach().contiguous().flatten().view(torch.uint8)
            start = end + gap
            end = start + piece.numel()
            entries.append(
                SimpleNamespace(
                    name=name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=piece.numel(),
                )
            )
            pieces.append(piece)
        flat = torch.cat(pieces)
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # the engine reads on a stream of its own
        return IpcBucket(flat, entries)


class _Handle:
    """Pickles a tensor as torch's own reduction does, but names its GPU by UUID."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        function, arguments = reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
        return function, arguments
