"""What the loss costs beside the model: the output head, the loss of its log-probs, and their way back.

Usage: python benchmarks/loss_path.py [--device cpu|cuda] [--tokens T] [--vocab V] [--hidden D] [--layers L] [--json OUT]

Two tables. `head` is the head alone, without a model: seconds of its forward and backward pass against a plain log-softmax of
whole logits, and the memory that is live beyond hidden states, the weight and the weight's gradient. `path` is a decoder of
`--layers` layers with that head: each part in seconds and as a ratio to one forward pass of decoder and head without
gradients. On cuda the defaults are those of the issue's bound (T 16,384, V 151,936, hidden 2,048, bf16: at most 1.5 GiB); on
the CPU they are small, in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GIB = 2**30
DEFAULTS = {
    "cpu": {"tokens": 2048, "vocab": 8192, "hidden": 256, "layers": 4},
    "cuda": {"tokens": 16384, "vocab": 151936, "hidden": 2048, "layers": 8},
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
SEQUENCE = 512
"""Tokens of each packed sequence of the decoder."""


class _LiveBytes(TorchDispatchMode):
    """Adds up the memory of tensors that operations made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._others: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view, or what is written in place, is memory that was there: of the operation's inputs, or counted already.
        self._others |= {
            t.untyped_storage()._cdata
            for t in tree_iter((args, kwargs))
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self._live
        }
        found = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._others:
                storage = tensor.untyped_storage()
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return found


def largest_live_bytes(run: Callable[[], object]) -> int:
    """The most memory that tensors made by `run` take at a time, results included; what a kernel takes inside is not seen."""
    with _LiveBytes() as mode:
        run()
    return mode.peak


def seconds_of(run: Callable[[], object], device: str, times: int) -> float:
    """Median seconds of a call, after one to warm up."""
    run()
    found: list[float] = []
    for _ in range(times):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def extra_bytes(run: Callable[[], object], device: str) -> int:
    """Memory that `run` takes beyond what was there; on cuda as the allocator counts it."""
    if device == "cpu":
        return largest_live_bytes(run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_head(sizes: dict[str, int], device: str, times: int) -> dict[str, dict[str, float]]:
    """The head alone: ours, and whole logits."""
    from miles.backends.training_utils.log_probs import token_log_probs

    dtype = DTYPES[device]
    torch.manual_seed(0)
    hidden_ND = torch.randn(sizes["tokens"], sizes["hidden"], device=device, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(sizes["vocab"], sizes["hidden"], device=device, dtype=dtype)
    weight_VD = (weight_VD / sizes["hidden"] ** 0.5).requires_grad_()
    targets_N = torch.randint(0, sizes["vocab"], (sizes["tokens"],), device=device)

    def whole(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_p_NV = torch.log_softmax((hidden_ND @ weight_VD.T).float() / temperature, dim=-1)
        return log_p_NV.gather(1, targets_N[:, None]).squeeze(1), -(log_p_NV.exp() * log_p_NV).sum(dim=1)

    found: dict[str, dict[str, float]] = {}
    for name, fn in (("chunked", token_log_probs), ("whole logits", whole)):

        def forward(fn: Any = fn) -> Tensor:
            logprobs_N, entropy_N = fn(hidden_ND, weight_VD, targets_N, 0.7)
            return logprobs_N.sum() + 0.01 * entropy_N.sum()

        def both(forward: Callable[[], Tensor] = forward) -> None:
            hidden_ND.grad = weight_VD.grad = None
            forward().backward()

        with torch.no_grad():
            forward_s = seconds_of(forward, device, times)
        hidden_ND.grad = weight_VD.grad = None
        extra = extra_bytes(both, device) - weight_VD.numel() * weight_VD.itemsize
        found[name] = {"forward_s": forward_s, "both_s": seconds_of(both, device, times), "extra_gib": extra / GIB}
    return found


def measure_path(sizes: dict[str, int], device: str, times: int) -> dict[str, float]:
    """Seconds of one forward pass, and of each part of the loss path, of a decoder with its head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from miles.backends.fsdp_utils.model import PolicyModel
    from miles.backends.fsdp_utils.packed_attention import use_packed_attention
    from miles.backends.training_utils.log_probs import Entropy, TargetLogProb, linear_log_softmax
    from miles.backends.training_utils.loss_hub.policy_loss import PolicyLoss
    from miles.backends.training_utils.loss_hub.records import LossInputs
    from miles.backends.training_utils.packing import FlatBatch

    torch.manual_seed(0)
    heads = max(1, sizes["hidden"] // 64)
    config = Qwen3Config(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=3 * sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        tie_word_embeddings=True,
    )
    hf = Qwen3ForCausalLM(config)
    nn.Module.to(hf, device=device, dtype=DTYPES[device])
    use_packed_attention(hf)
    model = PolicyModel(hf)
    count = max(1, sizes["tokens"] // SEQUENCE)
    sequences = torch.randint(0, sizes["vocab"], (count, SEQUENCE)).tolist()
    flat = FlatBatch.from_sequences(sequences)
    part = flat.micro_batch(np.arange(count)).to(torch.device(device))
    weight_VD = cast(nn.Linear, hf.get_output_embeddings()).weight
    tokens = len(part.targets_N)
    hidden_ND = torch.randn(tokens, sizes["hidden"], device=device, dtype=DTYPES[device], requires_grad=True)

    def scores() -> tuple[Tensor, ...]:
        return linear_log_softmax(hidden_ND, weight_VD, (TargetLogProb(part.targets_N), Entropy()), 0.7)

    with torch.no_grad():
        old_N = scores()[0] + 0.01 * torch.randn(tokens, device=device)
    loss = PolicyLoss(entropy_coef=0.01)
    number_N = torch.arange(tokens, device=device) // (SEQUENCE - 1)
    advantages_N = torch.randn(count, device=device)[number_N]

    def loss_both_ways(logprobs_N: Tensor, entropy_N: Tensor) -> None:
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            weights_N=torch.full_like(logprobs_N, 1 / tokens),
            trajectory_N=number_N,
            sample_N=number_N,
            old_logprobs_N=old_N,
            advantages_N=advantages_N,
        )
        output = loss(inputs)
        output.loss.backward()
        output.metrics()

    @torch.no_grad()
    def forward() -> None:
        model(part, 0.7)

    @torch.no_grad()
    def head_forward() -> None:
        scores()

    def loss_both() -> None:
        logprobs_N, entropy_N = (t.detach().requires_grad_() for t in known)
        loss_both_ways(logprobs_N, entropy_N)

    def path() -> None:
        hidden_ND.grad = weight_VD.grad = None
        loss_both_ways(*scores())

    def step() -> None:
        model.zero_grad()
        loss_both_ways(*model(part, 0.7, entropy=True))

    with torch.no_grad():
        known = scores()
    return {
        "forward": seconds_of(forward, device, times),
        "head forward": seconds_of(head_forward, device, times),
        "loss, both ways": seconds_of(loss_both, device, times),
        "loss path, both ways": seconds_of(path, device, times),
        "whole micro-batch": seconds_of(step, device, times),
    }


def main(argv: list[str]) -> int:
    """Print both tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tokens", "vocab", "hidden", "layers"):
        parser.add_argument(f"--{name}", type=int, help="default: by the device")
    parser.add_argument("--times", type=int, default=5, help="calls that a median is of")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(argv)
    sizes = {name: getattr(options, name) or value for name, value in DEFAULTS[options.device].items()}
    print(f"{options.device}, {DTYPES[options.device]}, " + ", ".join(f"{n} {v:,}" for n, v in sizes.items()))

    head = measure_head(sizes, options.device, options.times)
    print(f"\n{'head':<24} {'forward':>9} {'both ways':>10} {'extra memory':>13}")
    for name, row in head.items():
        print(f"{name:<24} {row['forward_s']:>8.4f}s {row['both_s']:>9.4f}s {row['extra_gib']:>9.3f} GiB")
    path = measure_path(sizes, options.device, options.times)
    print(f"\n{'path':<24} {'seconds':>9} {'of one forward':>15}")
    for name, seconds in path.items():
        print(f"{name:<24} {seconds:>8.4f}s {seconds / path['forward']:>14.2f}x")
    if options.json:
        options.json.write_text(json.dumps({"sizes": sizes, "head": head, "path": path}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
