"""The folder of a run: where everything it writes is found."""

# RUN_DIR/resolved.yaml    the settings, complete; `train.py RUN_DIR/resolved.yaml --run-dir NEW` runs them again
# RUN_DIR/metrics.jsonl  tensorboard/  curve.png  events.jsonl
# RUN_DIR/rollouts/0000003.jsonl  eval/...   samples as text
# RUN_DIR/checkpoints/iter_*   logs/*.log

from __future__ import annotations

import os
import time
from pathlib import Path

from miles.errors import ConfigError, Issue
from miles.utils.disk import fix_of, free_space

RESOLVED = "resolved.yaml"
_PROBE_BYTES = 1 << 16


def make_run_folder(name: str, folder: str | None) -> Path:
    """Create the run's folder: `folder`, or a new `runs/NAME-TIME` below the working directory. Returns its absolute path.

    Raises ConfigError when it cannot be written to.
    """
    path = Path(folder) if folder else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if folder is None:
            path = _new_folder(path)
        (path / "logs").mkdir(parents=True, exist_ok=True)
        _try_to_write(path)
    except OSError as e:
        problem = f"cannot write the run folder {path.absolute()}: {e.strerror or e}; {free_space(path)}"
        raise ConfigError([Issue("run.dir", problem, f"{fix_of(e)}: --run-dir FOLDER")]) from None
    return path.resolve()


def _new_folder(path: Path) -> Path:
    """`path`, or `path-2` and so on when it is there: another run of this second, or of before the clock was set back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir()
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        else:
            return candidate


def _try_to_write(path: Path) -> None:
    """Write a little and remove it: permissions tell nothing about root, quotas or a file system that is full."""
    probe = path / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
