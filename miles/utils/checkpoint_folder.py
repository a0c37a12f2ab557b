"""Checkpoint folders on disk: written beside their final name, complete or ignored."""

# CHECKPOINTS/latest_checkpointed_iteration.txt    "10"
# CHECKPOINTS/iter_0000010/                        renamed into place when complete
#     COMPLETE  trainer/  hf/  state.json

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.errors import CheckpointError

MARKER = "COMPLETE"
LATEST = "latest_checkpointed_iteration.txt"
STATE = "state.json"
STATE_VERSION = 1
_NAME = re.compile(r"iter_(\d{7,})")


def iteration_name(iteration: int) -> str:
    """`iter_0000010`: the checkpoint after ten steps."""
    return f"iter_{iteration:07d}"


def complete_iterations(folder: str | Path) -> list[int]:
    """Iterations of the complete checkpoints in `folder`, rising."""
    found = (_NAME.fullmatch(p.name) for p in Path(folder).glob("iter_*") if (p / MARKER).is_file())
    return sorted(int(m.group(1)) for m in found if m)


def resolve(path: str | Path) -> Path:
    """The checkpoint meant by `path`: one `iter_*` folder, or the latest complete one of a folder of checkpoints.

    Raises CheckpointError when there is none or it is incomplete.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder\n    fix: pass a folder of checkpoints, or one iter_* folder")
    if _NAME.fullmatch(folder.name):
        if not (folder / MARKER).is_file():
            raise CheckpointError(
                f"{folder}: incomplete, it was being written when its run ended\n    fix: load an older one"
            )
        return folder
    iterations = complete_iterations(folder)
    if not iterations:
        raise CheckpointError(
            f"{folder}: holds no complete checkpoint (iter_* with a {MARKER} file)\n    fix: pass RUN_DIR/checkpoints of a run that saved"
        )
    return folder / iteration_name(iterations[-1])


@contextmanager
def writing(folder: str | Path, iteration: int) -> Iterator[Path]:
    """Give a folder to write checkpoint `iteration` into; on success it is marked, renamed and becomes the latest.

    A folder of checkpoints has one writer: what an earlier one left half written is removed.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    final = root / iteration_name(iteration)
    draft = root / f".{final.name}.{os.getpid()}.partial"
    for stale in root.glob(".iter_*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        (draft / MARKER).write_text(f"{iteration}\n")
        _sync_tree(draft)
        _put_in_place(draft, final)
        _sync(root)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    tracker = root / f".{LATEST}.partial"
    tracker.write_text(f"{iteration}\n")
    tracker.replace(root / LATEST)


def _put_in_place(draft: Path, final: Path) -> None:
    """Give the complete `draft` its final name; a folder that has it already stays until then."""
    replaced = final.with_name(f".{final.name}.{os.getpid()}.replaced")
    if not final.exists():
        draft.rename(final)
        return
    final.rename(replaced)
    try:
        draft.rename(final)
    except OSError:
        replaced.rename(final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def remove_older(folder: str | Path, newest: int, keep: int, loaded_from: Path | None = None) -> None:
    """Remove complete checkpoints older than `newest`, so that with it `keep` are left.

    `loaded_from`, the checkpoint that the run started from, stays in any case, and so do those with a greater number.
    A checkpoint loses its name before its files, so that none is ever left with a part of them. Raises CheckpointError
    when one cannot be removed.
    """
    root = Path(folder)
    older = [n for n in complete_iterations(root) if n < newest]
    spare = [root / iteration_name(n) for n in older[: max(0, len(older) - (keep - 1))]]
    protected = loaded_from.resolve() if loaded_from is not None else None
    try:
        for checkpoint in spare:
            if checkpoint.resolve() != protected:
                checkpoint.rename(root / f".{checkpoint.name}.{os.getpid()}.removed")
        for removed in root.glob(".iter_*.removed"):
            shutil.rmtree(removed)
    except OSError as e:
        raise CheckpointError(
            f"{e.filename}: an old checkpoint cannot be removed ({e.strerror})\n"
            "    fix: remove it yourself, or leave --keep-last out"
        ) from e


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `state.json`, versioned; raises CheckpointError when `state` holds what JSON cannot."""
    try:
        text = json.dumps({"format": STATE_VERSION, **state})
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"{folder / STATE}: the run's state is no JSON: {e}\n    fix: state_dict() of your data source, and the samples "
            "that hooks give back to it, may hold only what JSON can: numbers, texts, lists and objects"
        ) from e
    (folder / STATE).write_text(text)


def read_state(folder: Path) -> dict[str, Any]:
    """Read `state.json`; raises CheckpointError when it is missing or of another version."""
    path = folder / STATE
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: unreadable ({e})\n    fix: load another checkpoint") from None
    if state.pop("format", None) != STATE_VERSION:
        raise CheckpointError(
            f"{path}: written by another version of Miles\n    fix: resume with the version that wrote it"
        )
    return state


def _sync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
