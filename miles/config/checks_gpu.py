"""What a run on GPUs needs: enough of them, an installed SGLang, and server arguments that it knows."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.memory_text import memory_suffices
from miles.config.nearest import nearest
from miles.config.resources import (
    engine_backend,
    gpu_memory,
    gpu_plan,
    machine_gpus,
    memory_of_gpu,
    needs_engines,
    resolved_device,
)
from miles.config.schema import RunConfig
from miles.errors import Issue
from miles.utils.model_dtype import model_config
from miles.utils.sglang_source import SUPPORTED, installed_sglang, is_supported

MANAGED = {
    "model_path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "dtype": "--sglang-dtype",
    "tp_size": "--rollout-num-gpus-per-engine",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "dp_size": "--rollout-engines",
    "data_parallel_size": "--rollout-engines",
    "max_running_requests": "--engine.max-running-requests",
    "context_length": "--rollout-max-context-len",
    "random_seed": "--rollout-seed",
    "enable_deterministic_inference": "--deterministic-mode",
}
"""Server arguments that follow from settings of the run, and from which."""
OURS = frozenset(
    [
        "config",
        "trust_remote_code",
        "enable_memory_saver",
        "host",
        "port",
        "api_key",
        "admin_api_key",
        "weight_version",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "nccl_port",
        "base_gpu_id",
        "gpu_id_step",
        "sampling_defaults",
        "use_ray",
        "tokenizer_worker_num",
        "device",
        "skip_server_warmup",
    ]
)
"""Server arguments that Miles sets, or that would break what it relies on."""


def there_are_gpus_enough(cfg: RunConfig) -> Iterator[Issue]:
    if resolved_device(cfg) != "cuda":
        if cfg.cluster.colocate:
            yield Issue("cluster.colocate", "shares GPUs, and this run is on CPU", "leave out --colocate")
        if cfg.train.cpu_offload:
            problem = "keeps what a GPU would hold in the CPU's memory, and this run is on CPU"
            yield Issue("train.cpu_offload", problem, "leave out --fsdp-cpu-offload")
        return
    there, plan, size = len(machine_gpus()), gpu_plan(cfg), cfg.engine.gpus_per_engine
    if not there:
        yield Issue("cluster.device", "no GPU is visible on this machine", "--device cpu, or a machine with a GPU")
    elif plan.engines and size > there:
        problem = f"an engine of {size} GPUs does not fit this machine, where {_are_visible(there)}"
        yield Issue("engine.gpus_per_engine", problem, f"--rollout-num-gpus-per-engine {_sharing(cfg, there)}")
    elif plan.wanted > there:
        ranks, engines = len(plan.train), len(plan.engines)
        fixes: list[str] = []
        if ranks and engines and not cfg.cluster.colocate and max(ranks, engines * size) <= there:
            fixes.append("--colocate, which lets trainer and engines share GPUs")
        fewer = [
            f"fewer {flag}" for flag, count in (("--train-ranks", ranks), ("--rollout-engines", engines)) if count > 1
        ]
        fixes += [" and ".join(fewer)] if fewer else []
        if engines and size > 1:
            fixes.append("fewer --rollout-num-gpus-per-engine")
        parts = [_counted(ranks, "trainer rank")] if ranks else []
        parts += [f"{_counted(engines, 'engine')} of {_counted(size, 'GPU')}"] if engines else []
        problem = f"{' and '.join(parts)} need {_counted(plan.wanted, 'GPU')}, and {_are_visible(there)}"
        yield Issue("cluster.train_ranks", problem, ", or ".join([*fixes, "a machine with more GPUs"]))


def visible_gpus_exist(cfg: RunConfig) -> Iterator[Issue]:
    """Whether each name of CUDA_VISIBLE_DEVICES is a GPU of this machine, where the machine tells which it has."""
    machine = [name for name in gpu_memory() if name.isdecimal()]
    if resolved_device(cfg) != "cuda" or not machine:
        return
    unknown = [name for name in machine_gpus() if not name.startswith("MIG-") and memory_of_gpu(name) is None]
    if unknown:
        yield Issue(
            "CUDA_VISIBLE_DEVICES",
            f"names GPU {', '.join(unknown)}, and this machine has {', '.join(machine)}",
            f"export CUDA_VISIBLE_DEVICES={','.join(machine)}, or unset it",
        )


def sglang_can_start(cfg: RunConfig) -> Iterator[Issue]:
    if not needs_engines(cfg) or cfg.engine.external:
        return
    if engine_backend(cfg) == "torch":
        if cfg.engine.sglang:
            names = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in cfg.engine.sglang)
            yield Issue("engine.sglang", f"the torch engine does not take {names}", "--engine-backend sglang")
        return
    if resolved_device(cfg) != "cuda":
        yield Issue("engine.backend", "SGLang needs a GPU, and this run is on CPU", "--engine-backend torch")
    sglang = installed_sglang()
    if sglang is None:
        yield Issue("engine.backend", "SGLang is not installed", "pip install 'miles[sglang]'")
    elif not is_supported(sglang.version):
        problem = f"SGLang {sglang.version} is installed, and Miles works with {SUPPORTED}"
        yield Issue("engine.backend", problem, f"pip install 'sglang{SUPPORTED}'")
    yield from server_arguments_are_known(cfg)


def server_arguments_are_known(cfg: RunConfig) -> Iterator[Issue]:
    """Each name of `engine.sglang` is one that the installed SGLang takes and that is the user's to give."""
    sglang = installed_sglang()
    for name in cfg.engine.sglang:
        flag = f"--sglang-{name.replace('_', '-')}"
        if name in MANAGED:
            yield Issue(flag, "follows from another setting", f"use {MANAGED[name]}")
        elif name in OURS:
            yield Issue(flag, "is set by Miles", f"leave out {flag}")
        elif sglang is not None and f"--{name.replace('_', '-')}" not in sglang.flags:
            known = [(known, f"--sglang-{known.removeprefix('--')}") for known in sorted(sglang.flags)]
            close = nearest(name, known)
            fix = f"did you mean {' or '.join(close)}?" if close else "see `sglang serve --help`"
            yield Issue(flag, f"SGLang {sglang.version} has no such server argument", fix)


def heads_are_shared_evenly(cfg: RunConfig) -> Iterator[Issue]:
    if not needs_engines(cfg) or cfg.engine.external:
        return
    size = cfg.engine.gpus_per_engine
    if engine_backend(cfg) == "torch" and size > 1:
        yield Issue("engine.gpus_per_engine", "the torch engine uses one GPU", "--engine-backend sglang")
    elif unshared := _unshared(cfg, size):
        yield Issue(
            "engine.gpus_per_engine",
            f"{size} GPUs cannot share the {unshared} of {cfg.model.hf_checkpoint}",
            f"--rollout-num-gpus-per-engine {_sharing(cfg, size)}",
        )


def _unshared(cfg: RunConfig, size: int) -> str:
    """What of the model `size` GPUs cannot share; empty when they can. A vocabulary is padded, so any number shares it."""
    config = model_config(cfg.model.hf_checkpoint)
    heads, inner = (
        config.get("num_attention_heads"),
        config.get("moe_intermediate_size", config.get("intermediate_size")),
    )
    kv_heads = config.get("num_key_value_heads")
    if isinstance(heads, int) and heads % size:
        return f"{heads} attention heads"
    if isinstance(kv_heads, int) and kv_heads and kv_heads % size and size % kv_heads:
        return f"{kv_heads} key-value heads, nor hold whole copies,"
    if isinstance(inner, int) and inner % size:
        return f"{inner} columns of {'an expert' if 'moe_intermediate_size' in config else 'the MLP'}"
    return ""


def _sharing(cfg: RunConfig, most: int) -> int:
    """The largest number of GPUs up to `most` that can share the model."""
    return next((size for size in range(most, 1, -1) if not _unshared(cfg, size)), 1)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _are_visible(number: int) -> str:
    return f"{_counted(number, 'GPU')} {'is' if number == 1 else 'are'} visible"


GPU_CHECKS = (
    visible_gpus_exist,
    there_are_gpus_enough,
    sglang_can_start,
    heads_are_shared_evenly,
    memory_suffices,
)
