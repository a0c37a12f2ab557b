"""One checksum of a tensor for trainer and engine."""

from __future__ import annotations

import ctypes

import torch
import xxhash


def checksum_tensor(t: torch.Tensor) -> str:
    """XXH3-128, in hex, over the tensor's contiguous bytes followed by its dtype and shape.

    The value does not depend on device or strides. Equal values in another dtype give another checksum.
    """
    data = t.detach().to("cpu").contiguous()
    digest = xxhash.xxh3_128()
    if data.numel():
        # Not by way of numpy: a tensor that was shared with it can never give its memory back.
        digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
    digest.update(f"|{str(data.dtype).removeprefix('torch.')}|{tuple(data.shape)}".encode())
    return digest.hexdigest()
