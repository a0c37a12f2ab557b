"""Where compiled kernels are kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

CACHES = {
    "FLASHINFER_WORKSPACE_BASE": "",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""The variable that says where, and the folder below the one that is named."""


def keep_kernels_in(folder: str | Path) -> None:
    """Let what is imported from now on keep its compiled kernels below `folder`, where the environment does not say otherwise."""
    for name, below in CACHES.items():
        os.environ.setdefault(name, str(Path(folder).absolute() / below))


__all__ = ["keep_kernels_in"]
