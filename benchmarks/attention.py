"""How long attention of packed sequences takes on a GPU: as rows through each kernel, and by its borders.

Usage: python benchmarks/attention.py [--times N] [--json OUT]

Forward and backward pass of one layer with 16 heads of queries, 8 of keys and values, of size 128, in bf16. `first` is the
first call with a shape, in which a kernel may be built for it; operations are counted as 3.5 matrix products over half of
length^2. `*` marks what the trainer takes. `SequenceLayout` weighs packs by figures that this prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from miles.backends.fsdp_utils import packed_attention
from miles.backends.training_utils.sequence_layout import SequenceLayout

HEADS, GROUPS, SIZE = 16, 8, 128
KINDS: dict[str, list[SDPBackend] | None] = {
    "rows, cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "rows, flash": [SDPBackend.FLASH_ATTENTION],
    "borders": None,
}


def packs() -> dict[str, list[int]]:
    """Equal, like and unlike lengths, the longest first."""
    rng = np.random.default_rng(0)

    def drawn(low: int, high: int, tokens: int) -> list[int]:
        lengths: list[int] = []
        while sum(lengths) < tokens:
            lengths.append(int(rng.integers(low, high)))
        return sorted(lengths, reverse=True)

    return {
        "8 x 2048": [2048] * 8,
        "1 x 16384": [16384],
        "25 x 640": [640] * 25,
        "8 x 2047": [2047] * 8,
        "1024 to 2048": drawn(1024, 2048, 15000),
        "256 to 2048": drawn(256, 2048, 15000),
        "128 to 640": drawn(128, 640, 15000),
        "16 to 256": drawn(16, 256, 15000),
        "8192 and short": [8192, *drawn(64, 512, 7000)],
    }


def both_ways(layout: SequenceLayout, tensors: list[Tensor], grad: Tensor) -> None:
    query, key, value = tensors
    attended, _ = packed_attention.packed_attention(
        nn.Identity(), query, key, value, None, scaling=SIZE**-0.5, sequence_layout=layout
    )
    torch.autograd.grad(attended, tensors, grad)


def seconds_of(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(lengths: list[int], kind: str, times: int) -> dict[str, Any]:
    """Seconds of the first call and the median of later ones."""
    device = torch.device("cuda")
    layout = SequenceLayout.of(lengths).to(device)
    taken = layout.by_borders == (KINDS[kind] is None) and kind != "rows, flash"
    layout.by_borders = KINDS[kind] is None
    total = sum(lengths)
    tensors = [
        torch.randn(1, total, heads, SIZE, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    grad = torch.randn(1, total, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    packed_attention.KERNELS = KINDS[kind] or packed_attention.KERNELS

    def run() -> None:
        both_ways(layout, tensors, grad)

    first = seconds_of(run)
    run()
    median = statistics.median(seconds_of(run) for _ in range(times))
    operations = 7.0 * HEADS * SIZE * sum(length * length for length in lengths)
    return {
        "kind": kind,
        "taken": taken,
        "groups": 1 if layout.by_borders else len(layout.groups),
        "first_ms": round(first * 1e3, 2),
        "ms": round(median * 1e3, 3),
        "tflops": round(operations / median / 1e12, 1),
    }


def main(argv: list[str]) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="calls that a median is of")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no GPU here")
        return 1
    rows: list[dict[str, Any]] = []
    kernels, failed = packed_attention.KERNELS, 0
    # What any first call pays is not a shape's.
    measure([256] * 4, "borders", 1)
    for name, lengths in packs().items():
        for kind in KINDS:
            packed_attention.KERNELS = kernels
            try:
                row = {"pack": name, "sequences": len(lengths), **measure(lengths, kind, options.times)}
            except RuntimeError:
                failed += 1
                traceback.print_exc()
                continue
            rows.append(row)
            print(
                f"{name:<15} {kind:<12} {'*' if row['taken'] else ' '} {row['groups']:>3} groups {row['ms']:>8.3f} ms "
                f"{row['tflops']:>6.1f} TFLOP/s, first {row['first_ms']:>8.2f} ms",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
