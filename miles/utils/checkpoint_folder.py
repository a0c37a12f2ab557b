"""Checkpoint folders on disk: written beside their final name, complete or ignored."""

# CHECKPOINTS/latest_checkpointed_iteration.txt    "10"
# CHECKPOINTS/iter_0000010/                        renamed into place when complete
#     COMPLETE  trainer/  hf/  state.json  run.json

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from miles.errors import CheckpointError
from miles.utils.disk import fix_of, free_space

MARKER = "COMPLETE"
LATEST = "latest_checkpointed_iteration.txt"
STATE = "state.json"
STATE_VERSION = 1
_NAME = re.compile(r"iter_(\d{7,})")
_HALF_WRITTEN = re.compile(r"\.iter_(\d{7,})\.\d+\.partial")
_REPLACED = re.compile(r"\.(iter_\d{7,})\.\d+\.replaced")


def iteration_name(iteration: int) -> str:
    """`iter_0000010`: the checkpoint after ten steps."""
    return f"iter_{iteration:07d}"


def complete_iterations(folder: str | Path) -> list[int]:
    """Iterations of the complete checkpoints in `folder`, rising."""
    found = (_NAME.fullmatch(p.name) for p in Path(folder).glob("iter_*") if (p / MARKER).is_file())
    return sorted(int(m.group(1)) for m in found if m)


def resolve(path: str | Path) -> Path | None:
    """The checkpoint meant by `path`: one `iter_*` folder, or the latest complete one of a folder of checkpoints.

    None when the folder is empty, or holds no more than what a save left that was cut short: the run's first. Raises
    CheckpointError when there is no such folder, it holds other things, or the `iter_*` folder is incomplete. Puts a
    checkpoint in place whose replacement was cut short.
    """
    folder = Path(path)
    settle(folder.parent if _NAME.fullmatch(folder.name) else folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder\n    fix: pass a folder of checkpoints, or one iter_* folder")
    if _NAME.fullmatch(folder.name):
        if not (folder / MARKER).is_file():
            raise CheckpointError(
                f"{folder}: incomplete, it was being written when its run ended\n    fix: load an older one"
            )
        return folder
    iterations = complete_iterations(folder)
    if not iterations and all(_HALF_WRITTEN.fullmatch(entry.name) for entry in folder.iterdir()):
        return None
    if not iterations:
        raise CheckpointError(
            f"{folder}: holds no complete checkpoint (iter_* with a {MARKER} file)\n    fix: pass RUN_DIR/checkpoints of a run that saved"
        )
    return folder / iteration_name(iterations[-1])


def skipped(path: str | Path) -> list[str]:
    """What a resume from `path` passes over: checkpoints newer than the one it takes, each with what is wrong with it."""
    folder = Path(path)
    if _NAME.fullmatch(folder.name) or not folder.is_dir():
        return []
    latest = max(complete_iterations(folder), default=-1)
    found: list[tuple[int, str]] = []
    for entry in folder.iterdir():
        if (m := _NAME.fullmatch(entry.name)) and int(m.group(1)) > latest:
            found.append((int(m.group(1)), f"{entry} is incomplete: it has no {MARKER} file"))
        if (m := _HALF_WRITTEN.fullmatch(entry.name)) and int(m.group(1)) > latest:
            found.append((int(m.group(1)), f"{entry} is incomplete: it was being written when its run ended"))
    return [text for _, text in sorted(found)]


def start(folder: str | Path, iteration: int) -> Path:
    """A new folder to write checkpoint `iteration` into, beside its final name: then `complete` it, or `discard` it.

    A folder of checkpoints has one writer: what an earlier one left half written, or was about to remove, is removed.
    Raises CheckpointError when it cannot be made.
    """
    root = Path(folder)
    draft = root / f".{iteration_name(iteration)}.{os.getpid()}.partial"
    settle(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".iter_*.partial"):
            discard(stale)
        for old in root.glob(".iter_*.replaced"):
            m = _REPLACED.fullmatch(old.name)
            if m and ((root / m.group(1) / MARKER).is_file() or not (old / MARKER).is_file()):
                discard(old)
        draft.mkdir()
    except OSError as error:
        raise cannot_write(draft, error) from error
    return draft


def complete(draft: Path, iteration: int) -> Path:
    """Mark `draft` as complete, see that it is on disk, give it its final name and make it the latest.

    Raises CheckpointError when the disk refuses; `draft` is then as incomplete as before.
    """
    root = draft.parent
    final = root / iteration_name(iteration)
    try:
        (draft / MARKER).write_text(f"{iteration}\n")
        _sync_tree(draft)
        _put_in_place(draft, final)
        _sync(root)
        tracker = root / f".{LATEST}.partial"
        tracker.write_text(f"{iteration}\n")
        tracker.replace(root / LATEST)
    except OSError as error:
        raise cannot_write(final, error) from error
    return final


def discard(draft: Path) -> None:
    """Remove what was written of a checkpoint that will not be completed, or is no longer wanted."""
    with suppress(OSError):
        (draft / MARKER).unlink()  # first: one that is removed in part is never taken for complete
    shutil.rmtree(draft, ignore_errors=True)


def settle(root: Path) -> None:
    """Put a checkpoint in place whose replacement was cut short between two renames: the new one, else the old one.

    Raises CheckpointError when the disk refuses.
    """
    for old in sorted(root.glob(".iter_*.replaced")):
        m = _REPLACED.fullmatch(old.name)
        if m is None or (root / m.group(1)).exists():
            continue
        final, new = root / m.group(1), old.with_suffix(".partial")
        wanted = next((folder for folder in (new, old) if (folder / MARKER).is_file()), None)
        if wanted is None:
            continue
        try:
            wanted.rename(final)
        except OSError as error:
            if not (final / MARKER).is_file():  # nor did its writer do it meanwhile
                raise cannot_write(final, error) from error


@contextmanager
def writing(folder: str | Path, iteration: int) -> Iterator[Path]:
    """Give a folder to write checkpoint `iteration` into; on success it is completed, else discarded.

    Raises CheckpointError when the disk refuses.
    """
    draft = start(folder, iteration)
    try:
        yield draft
        complete(draft, iteration)
    except OSError as error:
        told = cannot_write(draft, error)
        discard(draft)
        raise told from error
    except BaseException:
        discard(draft)
        raise


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error of a save that the disk refused: where, why, how much room there is, the way out."""
    return CheckpointError(
        f"{path}: the checkpoint cannot be written: {error.strerror or error}; {free_space(path)}; complete checkpoints "
        f"stay as they are\n    fix: {fix_of(error)}; then go on from the last complete checkpoint with --load"
    )


def _put_in_place(draft: Path, final: Path) -> None:
    """Give the complete `draft` its final name; a folder that has it already stays until that is on disk.

    No call can swap two folders on every file system, so for a moment neither has the name. `settle` ends that moment
    when this process cannot.
    """
    replaced = final.with_name(f".{final.name}.{os.getpid()}.replaced")
    if not final.exists():
        draft.rename(final)
        return
    final.rename(replaced)
    try:
        draft.rename(final)
    except OSError:
        if (final / MARKER).is_file():  # a run that was just started settled it
            return
        replaced.rename(final)
        raise
    _sync(final.parent)
    discard(replaced)


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
    """Write `state.json`, versioned; raises CheckpointError when `state` holds what JSON cannot, or the disk refuses."""
    try:
        text = json.dumps({"format": STATE_VERSION, **state})
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"{folder / STATE}: the run's state is no JSON: {e}\n    fix: state_dict() of your data source, and the samples "
            "that hooks give back to it, may hold only what JSON can: numbers, texts, lists and objects"
        ) from e
    try:
        (folder / STATE).write_text(text)
    except OSError as error:
        raise cannot_write(folder / STATE, error) from error


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
