"""`TrainGroup`: all trainer ranks as one `Trainer`, seen from the driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from miles.backends.weight_sync.records import SentWeights, TransportName
from miles.core.ports import Metrics, RolloutBatch
from miles.core.run_facts import EngineEndpoint
from miles.utils.waits import Waits


class TrainGroup:
    """Speaks to every rank; rank 0 answers for all.

    `lock` is held while the ranks work together: by `train`, `save` and `copy_state` themselves, and by whoever calls
    `send_weights` and `check_probes`, over all that belongs to one update.
    """

    def __init__(self, actors: list[Any], waits: Waits, *, save_hf: bool) -> None:
        self._actors, self._waits, self._save_hf = actors, waits, save_hf
        self.lock = asyncio.Lock()
        self.batches_trained = 0
        """Batches trained, or begun, in this process: as long as it stays, so do the weights."""

    async def _all(self, wait: str, method: str, *args: Any) -> Any:
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        return (await self._waits.on("trainer", wait, asyncio.gather(*refs)))[0]

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Every optimizer step of `batch`; returns the batch's metrics and the trainer's."""
        started_at = time.monotonic()
        async with self.lock:
            self.batches_trained += 1
            trained = await self._all(f"train step {batch.step}", "train", batch.data[0], batch.step)
        return {**batch.metrics, **trained, "perf/train_time": time.monotonic() - started_at}

    async def save(self, folder: str) -> None:
        """Write the trainer's state under `folder/trainer`, and the model under `folder/hf` if this run does so."""
        async with self.lock:
            await self._all("save", "save", f"{folder}/trainer")
        await self._export(folder)

    async def copy_state(self) -> None:
        """Copy what `save` would write now into the memory of the ranks."""
        async with self.lock:
            await self._all("copy the state", "copy_state")

    async def save_copy(self, folder: str) -> float:
        """Write the copy as `save` does, beside training; returns the seconds that the slowest rank and the export took.

        The export starts when every rank has written, since it is put together from what all of them wrote.
        """
        refs = [actor.write_copy.remote(f"{folder}/trainer") for actor in self._actors]
        seconds = max(await self._waits.on("trainer", "write the copied state", asyncio.gather(*refs)))
        return seconds + await self._export(folder)

    async def _export(self, folder: str) -> float:
        """Export by rank 0 of what is under `folder/trainer`; returns the seconds, as seen from here."""
        started_at = time.monotonic()
        if self._save_hf:
            export = self._actors[0].export_hf.remote(f"{folder}/trainer", f"{folder}/hf")
            await self._waits.on("trainer", "export the model", export)
        return time.monotonic() - started_at

    async def offload(self) -> None:
        """Move model and optimizer out of the memory of their device."""
        await self._all("leave the device", "offload")

    async def onload(self) -> None:
        """Move them back."""
        await self._all("return to the device", "onload")

    async def send_weights(
        self, engines: Iterable[EngineEndpoint], version: int, transport: TransportName | None = None
    ) -> SentWeights:
        """Send every weight to every engine as `version`; `transport` None is the run's own."""
        return await self._all(f"send weights {version}", "send_weights", list(engines), version, transport)

    async def ask_probes(self, engine: EngineEndpoint) -> None:
        """Have the engine score the probe sequences."""
        await self._all("have probes scored", "ask_probes", engine)

    async def check_probes(self, engine: EngineEndpoint, version: int) -> Metrics:
        """Score the probe sequences here, and compare with the engine's answer."""
        return await self._all("score probes", "check_probes", engine, version)
