"""Command lines of the servers that a run starts."""

from __future__ import annotations

import sys

from miles.config.resources import engine_backend, engine_dtype, num_engines, resolved_device, resolved_threads
from miles.config.schema import RunConfig


def engine_command(config: RunConfig) -> list[str]:
    """Command line of one inference engine."""
    if engine_backend(config) == "sglang":
        from miles.backends.sglang_utils.command import sglang_command

        return sglang_command(config)
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", config.model.hf_checkpoint]
    command += ["--max-running-requests", str(config.engine.max_running_requests), "--exit-on-stdin-close"]
    command += ["--threads", str(resolved_threads(config)), "--seed", str(config.rollout.seed)]
    command += ["--dtype", engine_dtype(config), "--device", resolved_device(config)]
    if config.rollout.max_context_len:
        command += ["--context-length", str(config.rollout.max_context_len)]
    if config.run.deterministic:
        command += ["--enable-deterministic-inference"]
    return command


def router_command(config: RunConfig) -> list[str]:
    """Command line of the router."""
    router = config.router
    command = [sys.executable, "-m", "miles.router", "--port", str(router.port), "--exit-on-stdin-close"]
    command += ["--health-check-interval", str(router.health_check_interval_s)]
    command += ["--health-check-timeout", str(router.health_check_timeout_s)]
    command += ["--failure-threshold", str(router.failure_threshold)]
    if config.fault_tolerance.enabled:  # requests wait for an engine that is started again; the run's waits end first
        command += ["--worker-wait", str(config.cluster.wait_timeout_s)]
    return [*command, "--max-connections", str(config.engine.concurrency * num_engines(config))]
