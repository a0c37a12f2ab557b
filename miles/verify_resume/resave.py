"""One trainer rank in a process of its own that loads a checkpoint and saves it again: both must be the same bits.

python -m miles.verify_resume.resave RESOLVED_YAML RANK RENDEZVOUS_FILE LOAD_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from miles.config.dump import undump
from miles.config.resources import num_train_ranks, resolved_threads
from miles.core.plugins import load_function
from miles.errors import MilesError
from miles.launch import WORKERS
from miles.utils.process import die_with_parent


def main(argv: Sequence[str]) -> int:
    """Load, save; returns the exit status."""
    recipe, rank, rendezvous, load_folder, out = argv
    config = undump(Path(recipe).read_text(encoding="utf-8"))
    try:
        worker = load_function(WORKERS[config.train.backend])(
            config,
            rank=int(rank),
            world_size=num_train_ranks(config),
            init_method=f"file://{rendezvous}",
            total_optimizer_steps=1,
            threads=resolved_threads(config),
        )
        worker.load(load_folder)
        worker.save(out)
        worker.close()
    except MilesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group's threads may outlive its end and abort an ordinary exit
