"""Settings of the machine: processes, threads, waits, deaths, and the run's own name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt

from miles.config.base import ConfigModel, Flag


class ClusterConfig(ConfigModel):
    """The machine: processes, threads, and how long waits may last."""

    num_cpus: Annotated[PositiveInt | None, Flag("--num-cpus")] = None
    """Logical CPUs that Ray may hand out; unset takes the machine's count."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("--device")] = "auto"
    """Where trainer and engines compute; `auto` takes the machine's GPUs when it has any."""
    colocate: Annotated[bool, Flag("--colocate")] = False
    """Trainer and engines take turns on the same GPUs; off gives each GPUs of its own."""
    offload_train: Annotated[bool | None, Flag("--offload-train")] = None
    """Move the trainer to the CPU's memory while the engines generate; unset does so with `--colocate`."""
    offload_rollout: Annotated[bool | None, Flag("--offload-rollout")] = None
    """Let engines give their memory up while the trainer works; unset does so with `--colocate`."""
    offload_rollout_level: Annotated[list[Literal["kv_cache", "weight"]], Flag("--offload-rollout-level")] = [
        "kv_cache",
        "weight",
    ]
    """What engines give up: the cache of keys and values, the weights, or both."""
    check_memory: Annotated[bool, Flag("--check-memory")] = True
    """Refuse a run whose predicted memory does not fit; the prediction is a table of `--dry-run`."""
    kernel_cache_dir: Annotated[str | None, Flag("--kernel-cache-dir")] = None
    """Folder of the kernels that SGLang and the trainer compile, for later starts to find; unset takes the caches of the home folder and of torch."""
    train_ranks: Annotated[PositiveInt, Flag("--train-ranks")] = 1
    """Trainer processes; each takes one logical CPU, and on GPUs one of them."""
    rollout_engines: Annotated[PositiveInt, Flag("--rollout-engines")] = 1
    """Inference engines; each takes one logical CPU, and on GPUs `--rollout-num-gpus-per-engine` of them."""
    threads: Annotated[PositiveInt | None, Flag("--torch-threads")] = None
    """Threads that torch computes with on the CPU in each trainer and torch engine. Unset: one beside a GPU, else the machine's cores, since training and generation take turns."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds a child process may take to start before the run stops."""
    wait_timeout_s: PositiveFloat = 3600.0
    """Seconds a wait on another process may last before the run stops with its name."""
    wait_report_s: PositiveFloat = 30.0
    """Seconds after which a wait is shown on the console by name, and again each time as many have passed."""


class FaultToleranceConfig(ConfigModel):
    """What happens when an engine or the router dies."""

    enabled: Annotated[bool, Flag("--use-fault-tolerance")] = True
    """Restart an engine or router that died, give the engine the current weights, and send its requests elsewhere; off ends the run."""
    max_restarts: PositiveInt = 3
    """Restarts of one engine, or of the router, without a finished step between them; one more ends the run."""


class RunSectionConfig(ConfigModel):
    """The run's name and folder."""

    dir: Annotated[str | None, Flag("--run-dir")] = None
    """Folder of this run; unset makes runs/NAME-TIME. A folder that holds another run is refused."""
    name: Annotated[str, Flag("--run-name")] = "miles"
    """Name shown on the console and in the run folder."""
    deterministic: Annotated[bool, Flag("--deterministic-mode")] = False
    """The same recipe gives the same bits again, also when it was killed and resumed: fixed shapes in the engines, groups in order of issue. Slower."""
    use_tensorboard: Annotated[bool, Flag("--use-tensorboard")] = True
    """Write TensorBoard events to RUN_DIR/tensorboard."""
