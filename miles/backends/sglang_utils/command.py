"""The command line of one SGLang server: what a run's settings mean there, and what users add."""

from __future__ import annotations

import sys
from typing import Any

from miles.config.resources import engine_dtype, offloaded_by_engines
from miles.config.schema import RunConfig


def sglang_command(config: RunConfig) -> list[str]:
    """Command line of one SGLang engine; what users gave as `--sglang-*` comes last, so that it wins over a default."""
    engine = config.engine
    running = engine.max_running_requests
    command = [sys.executable, "-m", "miles.backends.sglang_utils.serve", "--exit-on-stdin-close"]
    if config.cluster.kernel_cache_dir:
        command += ["--cache-dir", config.cluster.kernel_cache_dir]
    command += ["--model-path", config.model.hf_checkpoint, "--dtype", engine_dtype(config)]
    command += ["--tp-size", str(engine.gpus_per_engine), "--random-seed", str(config.rollout.seed)]
    command += ["--max-running-requests", str(running), "--cuda-graph-max-bs-decode", str(running)]
    # Requests say all their sampling parameters, and the version of the first weights is the publisher's 0.
    command += ["--sampling-defaults", "openai", "--weight-version", "0"]
    if config.rollout.max_context_len:
        command += ["--context-length", str(config.rollout.max_context_len)]
    if config.run.deterministic:
        command += ["--enable-deterministic-inference"]
    if offloaded_by_engines(config):
        command += ["--enable-memory-saver"]
    if config.weights.mode == "retract":
        command += ["--disable-radix-cache"]
    return command + _words(engine.sglang)


def _words(arguments: dict[str, Any]) -> list[str]:
    """`{"tp_size": 2, "enable_metrics": True}` as `--tp-size 2 --enable-metrics`; what is False or None is left out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
    return words
