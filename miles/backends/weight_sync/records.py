"""Records of a weight update. No torch: the driver reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from miles.core.run_facts import EngineEndpoint

TransportName = Literal["tensor", "broadcast", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """What a trainer sent in one update, by Hugging Face parameter name."""

    version: int
    nbytes: Mapping[str, int]
    checksums: Mapping[str, str]
    """Of every parameter; empty when no engine keeps them as the folder has them."""
    expected_nbytes: Mapping[str, int]
    """Names and bytes that the model folder says there are, read independently of the model in memory."""
    learned: bool
    """Some optimizer step since the update before had a learning rate and a gradient other than 0."""
    buckets: int
    seconds: float


class WeightSource(Protocol):
    """The trainer as a weight update sees it."""

    @property
    def lock(self) -> asyncio.Lock:
        """Held by whoever makes the trainer's ranks work together: a train step, a save, a publish. Not re-entrant."""
        ...

    @property
    def batches_trained(self) -> int:
        """Batches trained, or begun, in this process: as long as it stays, so do the weights."""
        ...

    async def send_weights(
        self, engines: Iterable[EngineEndpoint], version: int, transport: TransportName | None = None
    ) -> SentWeights:
        """Send every weight to every engine as `version`, the version with the last bucket.

        `transport` None is the run's own. Call it under `lock`.
        """
        ...

    async def ask_probes(self, engine: EngineEndpoint) -> None:
        """Have the engine score fixed sequences, for `check_probes`. Needs no weights here."""
        ...

    async def check_probes(self, engine: EngineEndpoint, version: int) -> dict[str, float]:
        """Score the sequences of `ask_probes` here; raises ParityError when the two differ by more than the bounds.

        Call it under `lock`. Needs nothing of the engine.
        """
        ...
