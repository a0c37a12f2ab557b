"""What a process learns while it runs, as values: addresses, endpoints, the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """Where an inference engine listens, and what it needs to be spoken to."""

    url: str
    engine_id: str
    pid: int
    token: str
    """Bearer token of the control routes."""
    log_path: str = ""
    model: str = "default"
    kind: Literal["torch", "sglang"] = "torch"
    """What serves there. SGLang fuses and shards parameters, so its checksums are by names of its own."""
    tp: int = 1
    """Processes that share the model, each on a GPU of its own."""
    gpu_ids: tuple[str, ...] = ()
    """The GPU of each of these processes, as CUDA_VISIBLE_DEVICES names it; empty on a CPU."""
    attachment: int = 0
    """How often the run has attached to this server, which somebody else started; 0 of an engine of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEndpoint:
    """Where the router of a served model listens."""

    url: str
    pid: int
    token: str
    """Bearer token of the control routes."""
    log_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that hooks may read beside its configuration, by these names."""

    run_dir: str = ""
    start_rollout_id: int = 0
    router_url: str = ""
    sglang_router_ip: str = ""
    sglang_router_port: int = 0
