"""Whose a checkpoint is: the id that a run gets at its first start and keeps over resumes, and its settings."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.errors import CheckpointError
from miles.utils.checkpoint_folder import cannot_write, complete_iterations, iteration_name, settle

FILE = "run.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `run.json` of a checkpoint says about the run that wrote it."""

    id: str
    settings: dict[str, Any]
    """The whole configuration as JSON."""


def new_id() -> str:
    """An id for a run that starts from step 0; needs no network and no process id, which containers share."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def write(folder: Path, record: RunRecord) -> None:
    """Write `run.json` into a checkpoint; raises CheckpointError when the disk refuses."""
    path = folder / FILE
    try:
        path.write_text(json.dumps({"format": VERSION, "id": record.id, "settings": record.settings}))
    except OSError as error:
        raise cannot_write(path, error) from error


def read(folder: Path) -> RunRecord | None:
    """Read `run.json` of a checkpoint; None when it has none. Raises CheckpointError when it cannot be understood."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
        if found["format"] == VERSION:
            return RunRecord(str(found["id"]), dict(found["settings"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError) as e:
        raise CheckpointError(f"{path}: unreadable ({e})\n    fix: load another checkpoint") from None
    raise CheckpointError(
        f"{path}: written by another version of Miles\n    fix: resume with the version that wrote it"
    )


def conflict(folder: Path, loaded: Path | None) -> str | None:
    """Why a run that starts from checkpoint `loaded`, or from none, must not save into `folder`; None when it may.

    It may save among its own checkpoints: those with the id of `loaded`, none of them later than it unless it lies in
    `folder` itself. Anything else would let a later `--load folder` take another run's checkpoint for this one's. Raises
    CheckpointError when a `run.json` cannot be understood.
    """
    settle(folder)
    iterations = complete_iterations(folder)
    if not iterations:
        return None
    own = _id_of(loaded) if loaded is not None else None
    foreign = [n for n in iterations if loaded is None or _id_of(folder / iteration_name(n)) != own]
    if foreign:
        return f"{folder} holds checkpoints of another run, the latest {iteration_name(foreign[-1])}"
    assert loaded is not None
    if loaded.resolve().parent != folder.resolve() and iteration_name(iterations[-1]) > loaded.name:
        latest = iteration_name(iterations[-1])
        return f"{folder} holds {latest} of this run, which is later than the checkpoint it is loaded from, {loaded}"
    return None


def later(folder: Path, loaded: Path) -> str | None:
    """What to tell when a run goes back to `loaded` and saves beside later checkpoints of its own; None when it does not."""
    latest = max(complete_iterations(folder), default=-1)
    if loaded.resolve().parent != folder.resolve() or latest <= int(loaded.name.removeprefix("iter_")):
        return None
    return (
        f"{folder / iteration_name(latest)} is later than the checkpoint this run goes back to: until the run has passed it, "
        f"--load {folder} takes that one"
    )


def _id_of(checkpoint: Path) -> str | None:
    record = read(checkpoint)
    return record.id if record is not None else None
