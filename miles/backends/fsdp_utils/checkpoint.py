"""The trainer's part of a checkpoint: each rank's rows as safetensors, and JSON. No pickle, no talk between ranks."""

# FOLDER/trainer.json                      format, ranks, shapes of the whole tensors, counters
# FOLDER/shards/rank_00000.safetensors     the rows of every tensor that rank 0 holds; its metadata says where they begin
# FOLDER/rng_rank0.safetensors             rank 0's random state

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from miles.backends.fsdp_utils.tensor_file import StoredTensor, write_tensors
from miles.errors import CheckpointError
from miles.utils.checkpoint_folder import cannot_write
from miles.utils.expert_weights import Place

FORMAT, VERSION = "miles-fsdp-trainer", 2
STATE = "trainer.json"
SHARDS = "shards"
MODEL = "model."
"""What the names of the model's own tensors begin with."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What one rank holds of a tensor: rows `start` and on of a whole of `shape`."""

    shape: tuple[int, ...]
    start: int
    local: Tensor


def rows_of(tensor: Tensor, rank: int, world_size: int) -> Rows:
    """The rank's part of a tensor sharded by FSDP2 along its first axis; a tensor that is not sharded is rank 0's."""
    if not isinstance(tensor, DTensor):
        whole = tensor if rank == 0 or not tensor.ndim else tensor[:0]
        return Rows(tuple(tensor.shape), 0, whole.detach())
    if tuple(tensor.placements) != (Shard(0),):
        raise CheckpointError(
            f"tensors sharded as {tensor.placements} cannot be saved; only rows over one mesh axis can"
        )
    per_rank = -(-tensor.shape[0] // world_size)
    return Rows(tuple(tensor.shape), min(rank * per_rank, tensor.shape[0]), tensor.to_local().detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Everything that one rank puts into a checkpoint."""

    rank: int
    world_size: int
    rows: dict[str, Rows]
    rng: Tensor
    state: dict[str, Any]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, rank: int, world_size: int) -> RankState:
        """Of this rank; shares memory with `tensors`."""
        rows = {name: rows_of(tensor, rank, world_size) for name, tensor in tensors.items()}
        return cls(rank=rank, world_size=world_size, rows=rows, rng=torch.get_rng_state(), state=dict(state))

    def copied(self) -> RankState:
        """The same in memory of its own, the CPU's, which training does not change."""
        held = {name: replace(rows, local=rows.local.to("cpu", copy=True)) for name, rows in self.rows.items()}
        return replace(self, rows=held)

    def write(self, folder: Path) -> None:
        """Write this rank's files into `folder`; they are on disk when this returns. The save is whole when every rank has.

        Raises CheckpointError, naming path and free space, when the disk refuses.
        """
        try:
            (folder / SHARDS).mkdir(parents=True, exist_ok=True)
            self._write_shard(folder)
            rng = {"torch": StoredTensor(tuple(self.rng.shape), self.rng.dtype)}
            write_tensors(_rng_file(folder, self.rank), rng, [("torch", self.rng)], {})
            if self.rank == 0:
                self._write_record(folder / STATE)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def _write_shard(self, folder: Path) -> None:
        # A tensor without axes has no rows to share out: rank 0 alone keeps it.
        held = {name: rows for name, rows in self.rows.items() if self.rank == 0 or rows.shape}
        stored = {name: StoredTensor(tuple(rows.local.shape), rows.local.dtype) for name, rows in held.items()}
        starts = json.dumps({name: rows.start for name, rows in held.items()})
        tensors = ((name, rows.local) for name, rows in held.items())
        write_tensors(_shard_file(folder, self.rank), stored, tensors, {"starts": starts})

    def _write_record(self, file: Path) -> None:
        record = {
            "format": FORMAT,
            "version": VERSION,
            "world_size": self.world_size,
            "tensors": {name: list(rows.shape) for name, rows in self.rows.items()},
            "state": self.state,
        }
        with file.open("w") as out:
            json.dump(record, out, indent=1, allow_nan=False)
            out.flush()
            os.fsync(out.fileno())


class SavedTrainer:
    """A saved trainer, read row by row whatever the number of ranks. Use it as a context; errors are CheckpointError."""

    def __init__(self, folder: Path) -> None:
        record = _read_record(folder)
        self._folder = folder
        self.world_size: int = record["world_size"]
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in record["tensors"].items()}
        self.state: dict[str, Any] = record["state"]
        self._files: list[tuple[Any, dict[str, int]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> SavedTrainer:
        with ExitStack() as opened:
            for rank in range(self.world_size):
                file = _shard_file(self._folder, rank)
                try:
                    shard = opened.enter_context(safe_open(file, framework="pt"))
                    starts = json.loads(shard.metadata()["starts"])
                except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
                    raise self._damaged(f"{file.name}: {error}") from error
                self._files.append((shard, starts))
            self._stack = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / SHARDS}: the shards do not load: {problem}\n    fix: resume from an older checkpoint"
        )

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        shape = self.shapes[name]
        return self.rows(name, 0, shape[0]) if shape else self._files[0][0].get_tensor(name)

    def at(self, place: Place, prefix: str) -> Tensor:
        """A model folder's tensor, where it lies in the saved one, whose name begins with `prefix`."""
        name = f"{prefix}{place.source}"
        if place.expert is None:
            return self.whole(name)
        return self.rows(name, place.expert, place.expert + 1)[0, place.start : place.stop].contiguous()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor, put together from all ranks' shards."""
        parts: list[Tensor] = []
        row = start
        for shard, starts in self._files:
            try:
                piece = shard.get_slice(name)
                begin, end = starts[name], starts[name] + piece.get_shape()[0]
            except (SafetensorError, KeyError) as error:
                raise self._damaged(f"{name} is not in every shard") from error
            if begin <= row < min(end, stop):
                parts.append(piece[row - begin : min(end, stop) - begin])
                row = min(end, stop)
        if row < stop:
            raise self._damaged(f"row {row} of {name} is in no shard")
        return torch.cat(parts) if parts else self._files[0][0].get_slice(name)[0:0]

    def rng(self, rank: int) -> Tensor | None:
        """The random state of `rank`; None when the save had fewer ranks."""
        if rank >= self.world_size:
            return None
        file = _rng_file(self._folder, rank)
        try:
            return load_file(file)["torch"]
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{file}: missing\n    fix: copy the whole checkpoint, or resume from an older one"
            ) from error
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"{file}: does not load: {error}\n    fix: resume from an older checkpoint"
            ) from error


def load_trainer(folder: Path, tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> dict[str, Any]:
    """Read into `tensors` in place and restore this rank's random state; returns the saved `state`.

    Another number of ranks than at save is fine: rows are cut anew, and a rank without a saved random state keeps its
    own. Raises CheckpointError when the checkpoint is missing or incomplete, of another format or version, or holds other
    tensors or shapes.
    """
    with SavedTrainer(folder) as saved:
        _require_same_tensors(folder, saved.shapes, {name: tuple(t.shape) for name, t in tensors.items()})
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                tensor.copy_(saved.whole(name))
                continue
            mine = rows_of(tensor, rank, world_size)
            mine.local.copy_(saved.rows(name, mine.start, mine.start + mine.local.shape[0]))
        rng = saved.rng(rank)
        if rng is not None:
            torch.set_rng_state(rng)
        return saved.state


def _require_same_tensors(
    folder: Path, saved: Mapping[str, tuple[int, ...]], mine: Mapping[str, tuple[int, ...]]
) -> None:
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


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / SHARDS / f"rank_{rank:05d}.safetensors"


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_rank{rank}.safetensors"


def _read_record(folder: Path) -> dict[str, Any]:
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
