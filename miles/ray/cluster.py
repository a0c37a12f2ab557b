"""The Ray cluster of a run: what it may use, its start, the watch over its processes, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
import ray
from ray.exceptions import RayError

from miles.errors import ClusterError, ConfigError, Issue
from miles.utils.process import last_lines

OBJECT_STORE_BYTES = 512 * 1024**2
WATCH_INTERVAL_S = 0.2
NOTICE_S = 1.0
END_GRACE_S = 5.0
ESSENTIAL = ("gcs_server", "raylet")
"""Ray's processes without which no call between actors arrives."""


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


@dataclass(frozen=True)
class _Essential:
    name: str
    process: psutil.Process
    log_path: str = ""


class Cluster:
    """A Ray cluster of this run's own on this machine. Start one at a time."""

    def __init__(self, num_cpus: int) -> None:
        """Start it."""
        before = set(psutil.Process().children())
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's record of every call, for its dashboard, which this cluster has not: gcs_server grew by 5 % in 150 steps.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # GPUs are handed out by name (decision 009): Ray is not to hide them, nor to warn that it will not always do so.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
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
        self._essential: list[_Essential] = []
        for process in psutil.Process().children():
            if process not in before and (name := process.name()) in ESSENTIAL:
                self._essential.append(_Essential(f"Ray's {name}", process))

    def guard(self, name: str, pid: int, log_path: str) -> None:
        """The run cannot do without this process either."""
        self._essential.append(_Essential(name, psutil.Process(pid), log_path))

    def lost(self) -> ClusterError | None:
        """The error of an essential process that has ended; None while all run."""
        for one in self._essential:
            if not _runs(one.process):
                lines = "".join(f"\n    | {line}" for line in last_lines(one.log_path).splitlines())
                log = f"\n    log: {one.log_path}" if one.log_path else ""
                return ClusterError(
                    f"{one.name} (process {one.process.pid}) has ended, and the run cannot go on without it{lines}{log}\n"
                    "    fix: when nothing above says why, something killed it or the machine ran out of memory (see dmesg); "
                    "resume from the last checkpoint with --load"
                )
        return None

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """When an essential process ends, cancel the present task and raise that process's ClusterError in its place.

        It also takes the place of the errors that follow from such an end, such as Ray's.
        """
        run = asyncio.current_task()
        assert run is not None
        watch = asyncio.create_task(self._watch())
        ends_already = False
        watch.add_done_callback(lambda done: None if done.cancelled() or ends_already else run.cancel())
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            ends_already = True
            if isinstance(error, RayError):
                await asyncio.wait({watch}, timeout=NOTICE_S)
            if lost := self.lost():
                run.uncancel()
                raise lost from error
            raise
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while self.lost() is None:
            await asyncio.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        """End the cluster and every process of it, in bounded time also when a part of it is gone."""
        tree = psutil.Process().children(recursive=True)
        whole = all(_runs(one.process) for one in self._essential)
        if not whole:
            _kill(tree)
        ray.shutdown()
        _, left = psutil.wait_procs([p for p in tree if _runs(p)], timeout=END_GRACE_S if whole else 0)
        _kill(left)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
