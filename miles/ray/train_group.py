"""`TrainGroup`: all trainer ranks as one `Trainer`, seen from the driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from miles.backends.weight_sync.records import SentWeights
from miles.core.ports import Metrics, RolloutBatch
from miles.core.run_facts import EngineEndpoint
from miles.utils.waits import Waits


class TrainGroup:
    """Speaks to every rank; rank 0 answers for all."""

    def __init__(self, actors: list[Any], waits: Waits, *, save_hf: bool) -> None:
        self._actors, self._waits, self._save_hf = actors, waits, save_hf

    async def _all(self, wait: str, method: str, *args: Any) -> Any:
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        return (await self._waits.on("trainer", wait, asyncio.gather(*refs)))[0]

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Every optimizer step of `batch`; returns the batch's metrics and the trainer's."""
        started_at = time.monotonic()
        trained = await self._all(f"train step {batch.step}", "train", batch.data[0], batch.step)
        return {**batch.metrics, **trained, "perf/train_time": time.monotonic() - started_at}

    async def save(self, folder: str) -> None:
        """Write the trainer's state under `folder/trainer`, and the model under `folder/hf` if this run does so."""
        await self._all("save", "save", f"{folder}/trainer")
        if self._save_hf:
            await self._all("export the model", "export_hf", f"{folder}/hf")

    async def send_weights(self, engines: Iterable[EngineEndpoint], version: int) -> SentWeights:
        """Send every weight to every engine as `version`."""
        return await self._all(f"send weights {version}", "send_weights", list(engines), version)

    async def check_probes(self, engine: EngineEndpoint, version: int) -> Metrics:
        """Compare trainer and engine on the probe sequences."""
        return await self._all("score probes", "check_probes", engine, version)
