"""What a run takes of the machine, and what follows from several settings: CPUs, threads, processes, data types, bounds."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from miles.config.estimators import ESTIMATORS
from miles.config.schema import OptimizerConfig, RunConfig
from miles.utils.engine_facts import ExpectedServer
from miles.utils.model_dtype import model_config, model_dtype

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_DEVICES = Path("/dev")
_GPU = re.compile(r"nvidia[0-9]+")
_GPU_NAME = re.compile(r"[0-9]+|(GPU|MIG)-.+")
_MEMINFO = Path("/proc/meminfo")
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_ASK_GPUS = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits")
_ASK_TIMEOUT_S = 20.0
MIB = 2**20


def machine_cores() -> int:
    """Cores that this process may use: its affinity, within a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def machine_gpus() -> tuple[str, ...]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; found without starting CUDA.

    As for CUDA, the first word there that names no GPU, such as -1, ends the list.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        end = next((i for i, name in enumerate(names) if not _GPU_NAME.fullmatch(name)), len(names))
        return tuple(names[:end])
    try:
        count = sum(bool(_GPU.fullmatch(entry.name)) for entry in _DEVICES.iterdir())
    except OSError:
        count = 0
    return tuple(map(str, range(count)))


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes, and how much of it other processes have now."""

    total: int
    used: int


@cache
def gpu_memory() -> dict[str, GpuMemory]:
    """Memory of the machine's GPUs by number and by UUID, as `nvidia-smi` tells it; empty where it tells nothing."""
    try:
        asked = subprocess.run(_ASK_GPUS, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_gpu_memory(asked.stdout)


def read_gpu_memory(told: str) -> dict[str, GpuMemory]:
    """The lines `index, uuid, total MiB, used MiB`; a line that says something else is left out."""
    found: dict[str, GpuMemory] = {}
    for line in told.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[2].isdecimal() and words[3].isdecimal():
            found[words[0]] = found[words[1]] = GpuMemory(int(words[2]) * MIB, int(words[3]) * MIB)
    return found


def memory_of_gpu(name: str) -> GpuMemory | None:
    """Memory of the GPU that CUDA_VISIBLE_DEVICES calls `name`: a number, or a UUID or its beginning."""
    machine = gpu_memory()
    if name in machine or not name.startswith("GPU-"):
        return machine.get(name)
    fitting = [memory for uuid, memory in machine.items() if uuid.startswith(name)]
    return fitting[0] if len(fitting) == 1 else None


def host_memory() -> int | None:
    """Bytes of memory that this machine has, within a container's limit; None where neither is told."""
    found: list[int] = []
    try:
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemTotal:"))
        found.append(int(line.split()[1]) * 1024)
    except (OSError, StopIteration, ValueError, IndexError):
        pass  # no Linux: a container's limit may still be there
    for file in _MEMORY_LIMITS:
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):
            continue  # not that kind of container, or `max`
    return min(found, default=None)


def resolved_device(cfg: RunConfig) -> Literal["cpu", "cuda"]:
    """`cpu` or `cuda`."""
    return ("cuda" if machine_gpus() else "cpu") if cfg.cluster.device == "auto" else cfg.cluster.device


def engine_backend(cfg: RunConfig) -> Literal["torch", "sglang"]:
    """`torch` or `sglang`."""
    if cfg.engine.backend != "auto":
        return cfg.engine.backend
    return "sglang" if resolved_device(cfg) == "cuda" else "torch"


def offloads_train(cfg: RunConfig) -> bool:
    """Whether the trainer leaves its device while the engines generate."""
    chosen = cfg.cluster.offload_train
    both = num_train_ranks(cfg) > 0 and num_engines(cfg) > 0
    return both and (cfg.cluster.colocate if chosen is None else chosen)


def offloaded_by_engines(cfg: RunConfig) -> tuple[str, ...]:
    """What engines give up while the trainer works, as `--offload-rollout-level` calls it."""
    chosen = cfg.cluster.offload_rollout
    return tuple(cfg.cluster.offload_rollout_level) if (cfg.cluster.colocate if chosen is None else chosen) else ()


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Which GPUs of the machine each trainer rank and each engine takes; empty on a CPU."""

    train: tuple[tuple[str, ...], ...]
    engines: tuple[tuple[str, ...], ...]
    wanted: int
    """GPUs that the run needs."""


def gpu_plan(cfg: RunConfig) -> GpuPlan:
    """One GPU a rank, then those of the engines; with `colocate`, engines begin with the first again.

    When there are too few, the last places are empty: see `wanted`.
    """
    ranks, engines, size = num_train_ranks(cfg), num_started_engines(cfg), cfg.engine.gpus_per_engine
    if resolved_device(cfg) == "cpu":
        return GpuPlan(((),) * ranks, ((),) * engines, 0)
    gpus = machine_gpus()
    first = 0 if cfg.cluster.colocate else ranks
    places = [range(first + i * size, first + (i + 1) * size) for i in range(engines)]
    return GpuPlan(
        tuple(gpus[rank : rank + 1] for rank in range(ranks)),
        tuple(tuple(gpus[i] for i in place if i < len(gpus)) for place in places),
        max(ranks, first + engines * size),
    )


def resolved_num_cpus(cfg: RunConfig) -> int:
    """Logical CPUs that Ray may hand out."""
    return cfg.cluster.num_cpus or machine_cores()


def resolved_threads(cfg: RunConfig) -> int:
    """Threads that torch computes with in each trainer and engine.

    Beside a GPU it is one: what is left to the CPU is small, and the GPU waits while threads for it are woken. Sixteen
    took 3 to 7 ms for an operation on 16,000 numbers that takes one 0.04 ms.
    """
    return cfg.cluster.threads or (1 if resolved_device(cfg) == "cuda" else machine_cores())


def offload_threads(cfg: RunConfig) -> int | None:
    """Threads of a trainer rank for sums of gradients and AdamW, where `--fsdp-cpu-offload` leaves them to the CPU."""
    if not cfg.train.cpu_offload:
        return None
    return cfg.cluster.threads or max(1, machine_cores() // max(1, num_train_ranks(cfg)))


def evaluates(cfg: RunConfig) -> bool:
    """Whether the run evaluates at all."""
    return cfg.eval.interval is not None or only_evaluates(cfg)


def only_evaluates(cfg: RunConfig) -> bool:
    """Whether the run has no step: it evaluates the model of `--hf-checkpoint` and ends."""
    return cfg.rollout.num_rollout == 0


def trains_on_rewards(cfg: RunConfig) -> bool:
    """Whether samples of training are judged. Asks for the number of steps only where there is something to evaluate."""
    could_evaluate = bool(cfg.eval.prompt_data or cfg.eval.datasets)
    return cfg.algorithm.loss_type != "sft_loss" and not (could_evaluate and only_evaluates(cfg))


def saves(cfg: RunConfig) -> bool:
    """Whether the run writes checkpoints at all."""
    asked = cfg.checkpoint.save_interval is not None or cfg.checkpoint.save_trigger_sentinel is not None
    return asked and not only_evaluates(cfg)


def only_trains(cfg: RunConfig) -> bool:
    """Whether the run is to do without engines, because it was told to or replays saved samples."""
    return cfg.debug.train_only or cfg.debug.load_rollout_data is not None


def needs_engines(cfg: RunConfig) -> bool:
    """Whether anything generates: a policy is trained on new samples, or the run evaluates."""
    return not only_trains(cfg) and (cfg.algorithm.loss_type != "sft_loss" or evaluates(cfg))


def num_engines(cfg: RunConfig) -> int:
    """Engines that the run generates with, started by it or not."""
    if not needs_engines(cfg):
        return 0
    return len(cfg.engine.external_addrs) if cfg.engine.external else cfg.cluster.rollout_engines


def num_started_engines(cfg: RunConfig) -> int:
    """Engines that the run starts itself."""
    return 0 if cfg.engine.external else num_engines(cfg)


def weights_transport(cfg: RunConfig) -> Literal["tensor", "broadcast", "disk"]:
    """How weights reach the engines: as set, else the way that fits who started them."""
    return cfg.weights.transport or ("disk" if cfg.engine.external else "tensor")


def num_train_ranks(cfg: RunConfig) -> int:
    """Trainer processes that the run starts."""
    return 0 if cfg.debug.rollout_only or only_evaluates(cfg) else cfg.cluster.train_ranks


def trains_critic(cfg: RunConfig) -> bool:
    """Whether the trainer has a critic beside the policy."""
    return cfg.algorithm.loss_type != "sft_loss" and ESTIMATORS[cfg.algorithm.advantage_estimator].needs_values


def critic_optimizer(cfg: RunConfig) -> OptimizerConfig:
    """The optimizer settings of the critic: the policy's with its own learning rate and warm-up, and a decay in proportion."""
    policy, lr = cfg.optimizer, cfg.optimizer.lr if cfg.critic.lr is None else cfg.critic.lr
    min_lr = policy.min_lr / policy.lr * lr if policy.lr else 0.0
    return policy.model_copy(update={"lr": lr, "min_lr": min_lr, "lr_warmup_iters": cfg.critic.lr_warmup_iters})


def engine_dtype(cfg: RunConfig) -> str:
    """Data type in which engines hold and are sent the weights: `float32`, `bfloat16` or `float16`."""
    return model_dtype(cfg.model.hf_checkpoint) if cfg.engine.dtype == "auto" else cfg.engine.dtype


FP32_PARITY, BF16_PARITY, EXPERTS_PARITY = (1e-3, 1e-2), (0.06, 0.3), (0.15, 1.5)
"""Mean and 99th percentile of |trainer - engine|, in nats, that rounding explains. In bf16 a mean of 0.028 and a 99th percentile
of 0.094 were the largest of Qwen3 on an H200; a model that is more sensitive sets its own (docs/user-guide/parity.md)."""


def parity_bounds(cfg: RunConfig) -> tuple[float, float]:
    """Largest mean and 99th percentile of |trainer - engine| that pass, in nats: as set, or by what the two compute in."""
    mean, p99 = FP32_PARITY if _computes_in_fp32(cfg) else EXPERTS_PARITY if _has_experts(cfg) else BF16_PARITY
    return cfg.parity.max_mean_diff or mean, cfg.parity.max_p99_diff or p99


def parity_only_warns(cfg: RunConfig) -> bool:
    """Whether a difference beyond the bounds is told and the run goes on: with experts in bf16, unless bounds were set."""
    unset = cfg.parity.max_mean_diff is None and cfg.parity.max_p99_diff is None
    return unset and _has_experts(cfg) and not _computes_in_fp32(cfg)


def _computes_in_fp32(cfg: RunConfig) -> bool:
    return not cfg.train.bf16 and engine_dtype(cfg) == "float32"


def _has_experts(cfg: RunConfig) -> bool:
    config = model_config(cfg.model.hf_checkpoint)
    return bool(config.get("num_experts") or config.get("num_local_experts"))


def expected_server(cfg: RunConfig) -> ExpectedServer:
    """What the run expects of servers that somebody else started."""
    limit = model_config(cfg.model.hf_checkpoint).get("max_position_embeddings")
    return ExpectedServer(
        kind=cfg.engine.backend,
        model_folder=cfg.model.hf_checkpoint,
        dtype=engine_dtype(cfg),
        tp=cfg.engine.gpus_per_engine,
        context_length=cfg.rollout.max_context_len or (limit if isinstance(limit, int) else None),
        deterministic=cfg.run.deterministic,
    )


def admin_key(cfg: RunConfig) -> str:
    """The servers' admin key, out of the environment; empty when there is none."""
    name = cfg.engine.external_admin_key_env
    return os.environ.get(name, "") if name is not None else ""
