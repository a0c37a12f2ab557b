"""Where a trainer rank computes, and the process group of all ranks: gloo for what is on CPUs, NCCL for what is on GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles.config.resources import resolved_device
from miles.config.schema import RunConfig
from miles.errors import TrainingError

CLOSE_TIMEOUT = timedelta(seconds=10)


def pick_device(config: RunConfig, rank: int) -> torch.device:
    """This rank's device, made the current one of this process.

    A process that sees one GPU takes it; of several the ranks of a host take one each. Raises TrainingError when the run
    is to compute on a GPU and torch finds none.
    """
    if resolved_device(config) == "cpu":
        return torch.device("cpu")
    if config.run.deterministic:
        # What cuBLAS needs to sum in the same order always; it reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    count = torch.cuda.device_count()
    if not count:
        raise TrainingError(
            f"rank {rank}: torch {torch.__version__} finds no GPU"
            "\n    fix: --device cpu, or a torch and a driver that go together (see `nvidia-smi`)"
        )
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


class Ranks:
    """The process group that this rank joined."""

    def __init__(
        self, device: torch.device, *, init_method: str, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        """Join at `init_method` (tcp://host:port or file://path), together with all other ranks."""
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world_size,))
        # A barrier that says who is missing is gloo's alone.
        group = dist.new_group(backend="gloo") if on_gpu and world_size > 1 else None
        self._leaving = cast("dist.ProcessGroup | None", group)
        self._world_size = world_size

    def leave(self) -> None:
        """Leave together: a rank that leaves early would break collectives of the others."""
        if dist.is_initialized():
            if self._world_size > 1:
                dist.monitored_barrier(group=self._leaving, timeout=CLOSE_TIMEOUT)
            dist.destroy_process_group()


__all__ = ["Ranks", "pick_device"]
