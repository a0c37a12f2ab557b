"""Two ranks that whiten their shares: `python -m tests.fast.training.whiten_ranks FOLDER` writes FOLDER/rank0.json, rank1.json."""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from miles.backends.training_utils.advantages import whiten
from miles.errors import TrainingError

CUTS = [0, 1, 5, 7, 10]


def values_and_mask():
    generator = torch.Generator().manual_seed(3)
    values = 100 + torch.randn(10, generator=generator, dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    values[mask == 0] = torch.nan
    return values, mask


def play(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    world = dist.group.WORLD
    values, mask = values_and_mask()
    found = {}
    for cut in CUTS:
        mine = slice(0, cut) if rank == 0 else slice(cut, None)
        found[f"cut {cut}"] = whiten(values[mine], mask[mine], world).tolist()
    for dtype in (torch.float32, torch.float64):
        share = torch.full((rank + 1,), 0.1, dtype=dtype)
        found[f"equal {dtype}"] = whiten(share, torch.ones(rank + 1), world).tolist()
    try:
        whiten(values[:2], torch.zeros(2), world)
    except TrainingError as error:
        found["masked"] = str(error)
    own = [dist.new_group([r]) for r in range(2)][rank]
    if rank == 1:
        found["alone"] = whiten(values, mask, own).tolist()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                play(rank, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
