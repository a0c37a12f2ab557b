"""Trainer ranks that send one update together: whose payload goes where, and what rank 0 and the others tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from miles.core.run_facts import EngineEndpoint
from miles.errors import WeightSyncError

SOURCE = 0
"""The rank that speaks to the engines."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a rank has of a bucket: a payload for each process that is to map it here, or why there is none."""

    payloads: list[str]
    failure: str = ""


class TrainerRanks:
    """This rank among all ranks of the trainer. Its methods are collective, over torch's default process group.

    Each bucket has one `gather` and one `agree`, so that no rank gives its memory up, or goes on, before rank 0 knows
    that every engine has copied it, and no rank waits for one that failed.
    """

    def __init__(self, rank: int = SOURCE, world_size: int = 1, gpus: tuple[str, ...] = ()) -> None:
        """`gpus` are those that this rank uses, as CUDA_VISIBLE_DEVICES names them."""
        self.rank, self._world_size, self._gpus = rank, world_size, gpus
        self._gpus_of_ranks: list[tuple[str, ...]] | None = None

    def routes(self, engines: Sequence[EngineEndpoint]) -> list[tuple[int, ...]]:
        """For each engine, the rank whose payload each of its processes maps. Collective where engines name their GPUs."""
        if self._world_size == 1 or not any(engine.gpu_ids for engine in engines):
            return route(engines, [self._gpus])
        if self._gpus_of_ranks is None:
            found: list[Any] = [None] * self._world_size
            dist.all_gather_object(found, self._gpus)
            self._gpus_of_ranks = cast("list[tuple[str, ...]]", found)
        return route(engines, self._gpus_of_ranks)

    def gather(self, mine: Prepared) -> list[list[str]]:
        """At rank 0 the payloads of every rank, elsewhere nothing. Rank 0 raises WeightSyncError when a rank has failed."""
        of_ranks: list[Any] | None = [None] * self._world_size if self.rank == SOURCE else None
        dist.gather_object(mine, of_ranks, dst=SOURCE)
        prepared = cast("list[Prepared]", of_ranks or [])
        failures = [f"trainer rank {rank}: {p.failure}" for rank, p in enumerate(prepared) if p.failure]
        if failures:
            raise WeightSyncError(
                f"a bucket of weights could not be prepared by {'; '.join(failures)}"
                "\n    fix: see the trainer ranks' logs; a smaller --update-weight-buffer-size takes less memory"
            )
        return [p.payloads for p in prepared]

    def agree(self, failure: str = "") -> str:
        """Why the bucket failed, as rank 0 says, at all ranks; empty when every engine has copied it."""
        told = [failure]
        dist.broadcast_object_list(told, src=SOURCE)
        return told[0]


def route(engines: Sequence[EngineEndpoint], gpus_of_ranks: Sequence[tuple[str, ...]]) -> list[tuple[int, ...]]:
    """For each engine, the rank on the GPU of each of its processes; where no rank is there, rank 0."""
    rank_on: dict[str, int] = {}
    for rank, gpus in enumerate(gpus_of_ranks):
        for gpu in gpus:
            rank_on.setdefault(gpu, rank)
    return [
        tuple(rank_on.get(gpu, SOURCE) for gpu in engine.gpu_ids) if engine.gpu_ids else (SOURCE,) * engine.tp
        for engine in engines
    ]


def deal(routes: Sequence[Sequence[int]], payloads_of_ranks: Sequence[Sequence[str]]) -> list[list[str]]:
    """For each engine the list of its processes' payloads; each payload goes to one process."""
    left = [iter(payloads) for payloads in payloads_of_ranks]
    return [[next(left[rank]) for rank in ranks] for ranks in routes]
