"""The folder of a run: where everything it writes is found."""

# RUN_DIR/resolved.yaml    the settings, complete; `train.py RUN_DIR/resolved.yaml --run-dir NEW` runs them again
# RUN_DIR/metrics.jsonl  tensorboard/  curve.png  events.jsonl
# RUN_DIR/rollouts/0000003.jsonl  eval/...   samples as text
# RUN_DIR/checkpoints/iter_*   logs/*.log

from __future__ import annotations

import time
from pathlib import Path

from miles.errors import MilesError

RESOLVED = "resolved.yaml"


def make_run_folder(name: str, folder: str | None) -> Path:
    """Create the run's folder: `folder`, or `runs/NAME-TIME` below the working directory. Returns its absolute path."""
    path = Path(folder) if folder else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise MilesError(
            f"cannot write the run folder {path}: {e}\n    fix: set --run-dir to a folder that can be written"
        ) from None
    return path.resolve()
