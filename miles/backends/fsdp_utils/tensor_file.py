"""Writing safetensors one tensor at a time, so that a file needs no second copy in memory, and other threads go on."""

# The format: 8 bytes of header length, the header as JSON (name -> dtype, shape, place), the tensors end to end.

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a safetensors header describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    file: Path,
    stored: Mapping[str, StoredTensor],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write `tensors`, which come in the order of `stored` and as it describes them; on disk when this returns.

    Raises OSError when the disk does, and ValueError when a tensor is not the one described.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in stored.items():
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for (name, tensor), (expected, described) in zip(tensors, stored.items(), strict=True):
            if (name, tuple(tensor.shape), tensor.dtype) != (expected, described.shape, described.dtype):
                raise ValueError(
                    f"{file}: {name} {tuple(tensor.shape)} {tensor.dtype} in place of {expected} {described}"
                )
            if tensor.numel():
                out.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
