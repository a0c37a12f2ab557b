"""Making Ray actors of plain classes, and what each does first: send its output to a log of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from miles.utils import heartbeat

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def enter(role: str, run_dir: str, *, gpus: Sequence[str] = (), blocks: bool = False) -> str:
    """Redirect this process's output to `RUN_DIR/logs/ROLE.log` and start its heartbeat; returns the log's path.

    Of the machine's GPUs it sees `gpus` alone, as CUDA_VISIBLE_DEVICES names them: by the plan of memory nothing else of
    the run is on them. `blocks`: this actor works in the thread of its event loop.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # some versions of Ray hide all of them, others none
    path = Path(run_dir) / "logs" / f"{role}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
    heartbeat.start(role, Path(run_dir) / heartbeat.FOLDER, blocks=blocks)
    return str(path)


def spawn(cls: type, *args: Any, num_cpus: int) -> Any:
    """Handle of a new actor of `cls`, placed on `num_cpus` logical CPUs; its methods are called with `.remote(...)`."""
    return ray.remote(num_cpus=num_cpus)(cls).remote(*args)
