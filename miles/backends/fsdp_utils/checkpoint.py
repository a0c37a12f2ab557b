"""The trainer's part of a checkpoint: sharded safetensors by torch.distributed.checkpoint, and JSON. No pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from miles.errors import CheckpointError

FORMAT, VERSION = "miles-fsdp-trainer", 1
STATE = "trainer.json"
SHARDS = "shards"


def save_trainer(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write `tensors` (sharded ones by their ranks), each rank's random state, and last `state`. Collective."""
    rank = dist.get_rank()
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    save_file({"torch": torch.get_rng_state()}, folder / f"rng_rank{rank}.safetensors")
    writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
    save_shards(dict(tensors), storage_writer=writer)
    dist.barrier()
    if rank == 0:
        record = {
            "format": FORMAT,
            "version": VERSION,
            "world_size": dist.get_world_size(),
            "tensors": {name: list(t.shape) for name, t in tensors.items()},
            "state": dict(state),
        }
        partial = folder / f"{STATE}.partial"
        partial.write_text(json.dumps(record, indent=1, allow_nan=False))
        os.replace(partial, folder / STATE)
    dist.barrier()


def load_trainer(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read into `tensors` in place and restore this rank's random state; returns the saved `state`. Collective.

    Another number of ranks than at save is fine: shards are cut anew, and a rank without a saved random state keeps its
    own. Raises CheckpointError when the checkpoint is missing or incomplete, of another format or version, or holds other
    tensors or shapes.
    """
    record = _read_state(folder)
    saved = {name: tuple(shape) for name, shape in record["tensors"].items()}
    mine = {name: tuple(t.shape) for name, t in tensors.items()}
    missing, unexpected = sorted(set(mine) - set(saved)), sorted(set(saved) - set(mine))
    misshapen = [f"{n} {saved[n]} instead of {mine[n]}" for n in sorted(set(mine) & set(saved)) if saved[n] != mine[n]]
    problems = [
        f"{len(names)} {what}, first {names[0]}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: the checkpoint is of another model: {'; '.join(problems)}"
            "\n    fix: resume with the --hf-checkpoint that the run was started with"
        )
    try:
        load_shards(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)))
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder / SHARDS}: the shards do not load: {error}\n    fix: resume from an older checkpoint"
        ) from error
    rng = folder / f"rng_rank{dist.get_rank()}.safetensors"
    if dist.get_rank() < record["world_size"]:
        if not rng.is_file():
            raise CheckpointError(f"{rng}: missing\n    fix: copy the whole checkpoint, or resume from an older one")
        torch.set_rng_state(load_file(rng)["torch"])
    return record["state"]


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: no complete trainer checkpoint (no {STATE})\n    fix: pass a folder that a finished save made"
        )
    try:
        record = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}\n    fix: resume from an older checkpoint") from error
    found = (record.get("format"), record.get("version")) if isinstance(record, dict) else None
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"{file}: format and version are {found}, this code reads {(FORMAT, VERSION)}"
            "\n    fix: resume with the version of Miles that wrote it"
        )
    for key in ("world_size", "tensors", "state"):
        if key not in record:
            raise CheckpointError(f"{file}: no {key!r}\n    fix: resume from an older checkpoint")
    return record
