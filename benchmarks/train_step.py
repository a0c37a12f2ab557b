"""How fast the FSDP2 trainer makes a step with the GRPO loss: log-probs, entropies, packed sequences, optimizer.

Usage: python benchmarks/train_step.py [--model NAME ...] [--pack 8x2048 ...] [--times N] [--seconds S] [--json OUT] [--tiny]

The trainer of a run, alone in a process, on a folder of random weights in the shape of the named Qwen3 model; `moe` is 8
layers of Qwen3-30B-A3B. Every token but the first of a sequence is trained on. Printed: median seconds of a step with their
spread, tokens a second, and the share of the GPU's 989 TFLOP/s in bf16, where a step has 6 (parameters outside the embedding
+ head) T + 6 layers heads head-size sum(length^2) operations: what is computed twice does not count, and of experts those
that a token goes through do. With --profile the kernels that take the most time.
`--tiny` is a small model and small packs, on a CPU if there is no GPU. A part that fails prints its traceback; the others run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles.backends.fsdp_utils.worker import FsdpTrainWorker
from miles.config.resources import resolved_threads
from miles.config.schema import RunConfig
from miles.core.train_batch import Column, TrainBatch

PEAK = 989e12
GIB = 2**30
MODELS: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    # 8 of the 48 layers of Qwen3-30B-A3B, which one GPU holds with the state of AdamW.
    "moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "tiny-moe": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
TINY = ["tiny", "tiny-moe"]


def model_config(name: str) -> Any:
    """The Qwen3 or Qwen3-MoE configuration of a shape."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    shape: dict[str, Any] = {**MODELS[name]}
    shape.setdefault("num_key_value_heads", min(8, shape["num_attention_heads"] // 2))
    make: Any = Qwen3Config
    if "num_experts" in shape:
        make, shape["norm_topk_prob"] = Qwen3MoeConfig, True
    return make(
        **shape,
        vocab_size=512 if name in TINY else 151936,
        head_dim=16 if name in TINY else 128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )


def write_model(name: str, folder: Path, device: str) -> None:
    """A folder with random bf16 weights of a shape."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def make_batch(lengths: list[int], vocabulary: int, seed: int) -> TrainBatch:
    """Sequences that put `lengths` tokens through the model: each has one more, which predicts nothing."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocabulary, length + 1) for length in lengths]
    numbers = list(range(len(lengths)))
    return TrainBatch(
        columns={
            "tokens": Column.from_rows(tokens, "token", "int64"),
            "loss_mask": Column.from_rows([np.ones(length) for length in lengths], "response"),
            "rollout_log_probs": Column.from_rows(
                [np.full(length, -np.log(vocabulary)) for length in lengths], "response"
            ),
            "reward": Column.from_rows(rng.normal(size=len(lengths)).tolist(), "sample"),
            "sample_index": Column.from_rows(numbers, "sample", "int64"),
            "trajectory": Column.from_rows(numbers, "sample", "int64"),
            "group_index": Column.from_rows([0] * len(lengths), "sample", "int64"),
        }
    )


def operations(name: str, lengths: list[int]) -> float:
    """Floating-point operations of a step, forward and backward."""
    config = model_config(name)
    width = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * width + 2 * kv)
    if experts := getattr(config, "num_experts", 0):
        layer += config.num_experts_per_tok * 3 * config.hidden_size * config.moe_intermediate_size
        layer += experts * config.hidden_size
    else:
        layer += 3 * config.hidden_size * config.intermediate_size
    matrices = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    squares = sum(length * length for length in lengths)
    return 6.0 * matrices * sum(lengths) + 6.0 * config.num_hidden_layers * width * squares


@contextmanager
def open_worker(folder: Path, device: str, tokens: int, **train: Any) -> Iterator[FsdpTrainWorker]:
    """The trainer of a run on this machine alone."""
    config = RunConfig.model_validate(
        {
            "model": {"hf_checkpoint": str(folder)},
            "cluster": {"device": device},
            "train": {"bf16": device == "cuda", "max_tokens_per_gpu": tokens, **train},
            "algorithm": {"entropy_coef": 0.001, "use_rollout_logprobs": True},
            "optimizer": {"lr": 1e-6},
            "parity": {"enabled": False},
        }
    )
    worker = FsdpTrainWorker(
        config,
        rank=0,
        world_size=1,
        init_method=f"file://{folder}/rendezvous-{time.monotonic_ns()}",
        total_optimizer_steps=1000,
        threads=resolved_threads(config),
    )
    try:
        yield worker
    finally:
        worker.close()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def steps(worker: FsdpTrainWorker, batches: list[TrainBatch], device: str) -> list[float]:
    """Seconds of one step on each batch."""
    found: list[float] = []
    for number, batch in enumerate(batches):
        started = time.perf_counter()
        metrics = worker.train(batch, number)
        wait(device)
        found.append(time.perf_counter() - started)
        if metrics["train/skipped_steps"] or metrics["train/empty_steps"]:
            raise RuntimeError(f"the step was not made: {metrics}")
    return found


def kernels(worker: FsdpTrainWorker, batch: TrainBatch, device: str, most: int) -> list[dict[str, Any]]:
    """The kernels of a step that take the most time, in milliseconds with their number of calls."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        steps(worker, [batch], device)
    events = profiler.key_averages()
    wanted = [e for e in events if not on_gpu or str(e.device_type).endswith("CUDA")]
    cost = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    total = sum(getattr(e, cost) for e in wanted)
    wanted.sort(key=lambda e: -getattr(e, cost))
    rows = [{"name": "all", "ms": total / 1e3, "calls": sum(e.count for e in wanted)}]
    return rows + [{"name": e.key[:90], "ms": getattr(e, cost) / 1e3, "calls": e.count} for e in wanted[:most]]


def measure(name: str, packs: list[list[int]], options: Any, device: str) -> Iterator[dict[str, Any]]:
    """One row for each pack."""
    vocabulary = model_config(name).vocab_size
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and shutil.disk_usage(memory).free > 32 * GIB else None
    train = {"recompute": options.recompute, **({"compile_layers": False} if options.eager else {})}
    with tempfile.TemporaryDirectory(dir=base) as folder:
        started = time.perf_counter()
        write_model(name, Path(folder), device)
        written = time.perf_counter()
        with open_worker(Path(folder), device, max(map(sum, packs)) + 64, **train) as worker:
            loaded = time.perf_counter()
            worker.warm_up()
            warm = time.perf_counter()
            print(
                f"{name}: written in {written - started:.1f} s, loaded in {loaded - written:.1f} s, "
                f"warmed up in {warm - loaded:.1f} s",
                flush=True,
            )
            for lengths in packs:
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                batches = [make_batch(lengths, vocabulary, seed) for seed in range(options.times)]
                (first,) = steps(worker, batches[:1], device)
                steps(worker, batches[:2], device)
                seconds = steps(worker, batches, device)
                median, flops = statistics.median(seconds), operations(name, lengths)
                row: dict[str, Any] = {
                    "model": name,
                    "pack": f"{len(lengths)} x {max(lengths)}",
                    "tokens": sum(lengths),
                    "first_step_s": round(first, 2),
                    "step_s": round(median, 4),
                    "least_s": round(min(seconds), 4),
                    "most_s": round(max(seconds), 4),
                    "steps": len(seconds),
                    "tokens_per_s": round(sum(lengths) / median),
                    "tflops": round(flops / median / 1e12, 1),
                    "share_of_989": round(flops / median / PEAK, 4),
                }
                if device == "cuda":
                    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
                if options.profile and lengths is packs[0]:
                    row["kernels"] = kernels(worker, batches[0], device, options.profile)
                yield row


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:<8} {row['pack']:>10} {row['step_s']:>8.4f} s ({row['least_s']:.4f} to {row['most_s']:.4f}) "
        f"{row['tokens_per_s']:>8,} tokens/s {row['tflops']:>6.1f} TFLOP/s {row['share_of_989']:>6.1%} of 989, "
        f"{row.get('peak_gib', 0):.1f} GiB, first step {row['first_step_s']:.1f} s",
        flush=True,
    )
    for kernel in row.get("kernels", ()):
        print(f"      {kernel['ms']:>8.2f} ms {kernel['calls']:>5} x {kernel['name']}", flush=True)


def pack(text: str) -> list[int]:
    """`8x2048` or `2048,1024,77`."""
    count, _, length = text.partition("x")
    return [int(length)] * int(count) if length else [int(part) for part in text.split(",")]


def main(argv: list[str]) -> int:
    """Print a line for each model and pack; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["0.6b", "4b", "1.7b"])
    parser.add_argument("--pack", nargs="+", type=pack, default=[pack("8x2048"), pack("1x16384")])
    parser.add_argument("--times", type=int, default=5, help="steps that a median is of")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no model after so many")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="show the N kernels that take the most time"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model and small packs")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models, packs = options.model, options.pack
    if options.tiny:
        models, packs = TINY, [[32] * 4, [100, 20, 7]]
    versions: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if device == "cuda":
        versions["device"] = torch.cuda.get_device_name()
    print(versions, flush=True)
    rows: list[dict[str, Any]] = []
    failed, started = 0, time.perf_counter()
    for name in models:
        if time.perf_counter() - started > options.seconds:
            print(f"{name}: not begun, {options.seconds:.0f} seconds are over", flush=True)
            continue
        try:
            for row in measure(name, packs, options, device):
                show(row)
                rows.append(row)
                if options.json:
                    options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
        except Exception:  # noqa: BLE001  one model that does not fit must not hide what others reach
            failed += 1
            traceback.print_exc()
        if device == "cuda":
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
