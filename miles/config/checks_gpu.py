"""What a run on GPUs needs: enough of them, an installed SGLang, and server arguments that it knows."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.nearest import nearest
from miles.config.resources import engine_backend, gpu_plan, machine_gpus, needs_engines, resolved_device
from miles.config.schema import RunConfig
from miles.errors import Issue
from miles.utils.model_dtype import model_config
from miles.utils.sglang_source import installed_sglang

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
        return
    there, plan = len(machine_gpus()), gpu_plan(cfg)
    if not there:
        yield Issue("cluster.device", "no GPU is visible on this machine", "--device cpu, or a machine with a GPU")
    elif plan.wanted > there:
        fix = "fewer --train-ranks or --rollout-engines"
        if not cfg.cluster.colocate:
            fix = f"--colocate, which lets trainer and engines share GPUs, or {fix}"
        needs = f"{len(plan.train)} trainer ranks and {len(plan.engines)} engines of {cfg.engine.gpus_per_engine} GPUs"
        yield Issue("cluster.train_ranks", f"{needs} need {plan.wanted} GPUs, and {there} are visible", fix)


def sglang_can_start(cfg: RunConfig) -> Iterator[Issue]:
    if not needs_engines(cfg):
        return
    if engine_backend(cfg) == "torch":
        if cfg.engine.sglang:
            names = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in cfg.engine.sglang)
            yield Issue("engine.sglang", f"the torch engine does not take {names}", "--engine-backend sglang")
        return
    if resolved_device(cfg) != "cuda":
        yield Issue("engine.backend", "SGLang needs a GPU, and this run is on CPU", "--engine-backend torch")
    if installed_sglang() is None:
        yield Issue("engine.backend", "SGLang is not installed", "pip install 'miles[sglang]'")
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
    size = cfg.engine.gpus_per_engine
    heads = model_config(cfg.model.hf_checkpoint).get("num_attention_heads")
    if engine_backend(cfg) == "torch" and size > 1:
        yield Issue("engine.gpus_per_engine", "the torch engine uses one GPU", "--engine-backend sglang")
    elif isinstance(heads, int) and heads % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n <= size]
        yield Issue(
            "engine.gpus_per_engine",
            f"{size} GPUs cannot share the {heads} attention heads of {cfg.model.hf_checkpoint}",
            f"--rollout-num-gpus-per-engine {fitting[-1]}",
        )


GPU_CHECKS = (there_are_gpus_enough, sglang_can_start, heads_are_shared_evenly)
