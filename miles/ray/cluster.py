"""The Ray cluster of a run: what it may use, its start and its end."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import ray

from miles.errors import ConfigError, Issue

OBJECT_STORE_BYTES = 512 * 1024**2


def check_placement(wanted: Mapping[str, int], num_cpus: int) -> None:
    """Refuse processes that Ray could never place: it would wait for them for ever.

    `wanted` maps a kind of process to its count, each taking one logical CPU. Raises ConfigError.
    """
    total = sum(wanted.values())
    if total > num_cpus:
        listed = " + ".join(f"{count} {kind}" for kind, count in wanted.items())
        problem = f"{listed} need {total} logical CPUs, but Ray may place {num_cpus}"
        raise ConfigError(
            [Issue("cluster.num_cpus", problem, f"set --num-cpus {total} (they share the cores), or start fewer")]
        )


def start(num_cpus: int) -> None:
    """Start a Ray cluster of this run's own on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # OpenMP threads that spin while they wait take the cores from the process whose turn it is: trainer, engine and
    # manager share them. A step of the quickstart took 5 to 30 s instead of 1 s beside one other busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )


def stop() -> None:
    """End the cluster and every process of it."""
    ray.shutdown()
