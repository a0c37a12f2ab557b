"""Ranks of small stories in processes of their own: one process imports torch and forks them, story after story."""

# python -m tests.fast.training.gloo_ranks FOLDER NAME:RANKS ...    each rank writes FOLDER/NAME-RANKS-RANK.pt

import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from miles.backends.training_utils.context_parallel import CpSlices
from miles.backends.training_utils.log_probs import Entropy, TargetLogProb, TopK, linear_log_softmax
from miles.backends.training_utils.vocab_parallel import VocabShard

ROOT = Path(__file__).resolve().parents[3]
N, D, V, K, TEMPERATURE = 9, 5, 13, 3, 0.7
LENGTHS = (11, 1, 8, 3)


def head_inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def head_loss(logprobs, entropy, best):
    mix = torch.linspace(-1, 2, N, dtype=torch.float64)
    return (mix * logprobs).sum() + (mix.flip(0) * entropy).sum() + (best * torch.tensor([1.0, -2.0, 0.5])).sum()


def vocab(rank, ranks):
    """The head's rows spread unevenly over ranks."""
    hidden, weight, targets = head_inputs()
    borders = [0, 2, V] if ranks == 2 else [round(r * V / ranks) for r in range(ranks + 1)]
    mine = weight[borders[rank] : borders[rank + 1]].clone().requires_grad_()
    shard = VocabShard.of(mine, dist.group.WORLD)
    assert shard.start == borders[rank]
    logprobs, entropy, best, ids = linear_log_softmax(
        hidden,
        mine,
        (TargetLogProb(targets), Entropy(), TopK(K)),
        TEMPERATURE,
        chunk_elements=4 * len(mine),
        vocabulary=shard,
    )
    head_loss(logprobs, entropy, best).backward()
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "best": best.detach(),
        "ids": ids,
        "grad_hidden": hidden.grad,
        "grad_weight": mine.grad,
    }


def cp_values():
    return torch.randn(sum(LENGTHS), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cp_loss(whole):
    """Not a sum over tokens, so that gradients of one token depend on all; each rank adds a term of its own."""
    return whole.cumsum(0).square().sum()


def context(rank, ranks):
    """Slices of a pack, the whole from them, and gradients through both, in both layouts."""
    found = {}
    for layout in ("zigzag", "contiguous"):
        slices = CpSlices.of(LENGTHS, ranks, layout)
        values = cp_values().requires_grad_()
        local = slices.slice(values, rank)
        local.retain_grad()
        whole = slices.gather(local, dist.group.WORLD)
        (cp_loss(whole) * (rank + 1)).backward()
        found[layout] = {
            "local": local.detach(),
            "whole": whole.detach(),
            "grad": values.grad,
            "grad_local": local.grad,
        }
    return found


STORIES = {"vocab": vocab, "context": context}


def play(folder, story, ranks):
    """Fork the ranks and wait for them."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                init = f"file://{folder}/store-{story}-{ranks}"
                dist.init_process_group(
                    "gloo", init_method=init, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
                )
                torch.save(STORIES[story](rank, ranks), folder / f"{story}-{ranks}-{rank}.pt")
                dist.barrier()
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        sys.exit(f"a rank of {story} failed")


def play_all(folder, *stories):
    """Play stories, each NAME:RANKS; gives what the ranks returned, by name, ranks and rank."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fast.training.gloo_ranks", str(folder), *stories],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for story in stories:
        name, ranks = story.split(":")
        found[name, int(ranks)] = [torch.load(folder / f"{name}-{ranks}-{r}.pt") for r in range(int(ranks))]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        play(Path(sys.argv[1]), each.split(":")[0], int(each.split(":")[1]))
