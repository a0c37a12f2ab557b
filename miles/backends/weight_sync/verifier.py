"""The proofs around one update, in their order: garbage before it, names, bytes and checksums after it, a second load path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from miles.backends.weight_sync import lifecycle, proof
from miles.backends.weight_sync.records import SentWeights, TransportName, WeightSource
from miles.core.run_facts import EngineEndpoint
from miles.errors import WeightSyncError
from miles.utils.http_utils import HttpError
from miles.utils.waits import Waits


class Verifier:
    """Proofs (a) to (d), with what they must remember between updates. It speaks to engines over HTTP alone.

    (a) the first update of a run that starts from the model folder overwrites garbage, and must restore what the engines
    had loaded; (b) every update: version, names, bytes, engines that agree, checksums that changed if anything was
    learned; (c) every `reload_interval`-th update, one engine loads the same weights by `second_path` over garbage, and
    must report the same checksums; (d) the checksum of every parameter equals the trainer's, where an engine keeps
    parameters as the folder has them (`EngineEndpoint.kind`).
    """

    def __init__(
        self,
        source: WeightSource,
        waits: Waits,
        *,
        enabled: bool,
        starts_from_folder: bool,
        reload_interval: int,
        second_path: TransportName,
    ) -> None:
        self._source, self._waits, self._enabled = source, waits, enabled
        self._restores = enabled and starts_from_folder
        self._reload_interval = reload_interval
        self._second_path: TransportName = second_path
        self._proven = 0
        self._remembered: set[str] = set()
        self._checksums: dict[str, str] = {}
        self._version = 0
        self.seconds = 0.0
        """Seconds spent on proofs since `start_timing`."""

    def start_timing(self) -> None:
        """Count seconds from 0 again."""
        self.seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - started_at

    async def before(self, engines: Sequence[EngineEndpoint]) -> None:
        """(a), first half: remember what the engines loaded, then overwrite it with garbage."""
        if self._restores:
            with self._timed():
                # A second attempt must not take what the first left for what was loaded.
                await self._check([e for e in engines if e.url not in self._remembered], "snapshot")
                self._remembered |= {e.url for e in engines}
                await self._check(engines, "reset_tensors")

    async def prove(self, engines: Sequence[EngineEndpoint], sent: SentWeights) -> None:
        """Every proof that is due after an update. Raises WeightSyncError."""
        with self._timed():
            proof.check_versions(sent, await lifecycle.versions(engines))
            if not self._enabled:
                return
            proof.check_sent(sent)
            if self._restores:
                await self._compare(engines)
            held = await self._held(engines, sent)
            now = sent.checksums or held[engines[0].engine_id]
            proof.check_changed(sent, self._checksums, now)
            if self._reload_interval and (self._proven + 1) % self._reload_interval == 0:
                await self._reload(engines[0], sent, held[engines[0].engine_id])
        self._proven += 1
        self._remember(sent, now)

    async def prove_one(self, engine: EngineEndpoint, sent: SentWeights) -> None:
        """Prove that one engine, brought up between two updates, holds the weights of the last. Raises WeightSyncError.

        When no engine lived at the last update, this engine is the first to hold its version.
        """
        proof.check_versions(sent, await lifecycle.versions([engine]))
        if self._enabled:
            proof.check_sent(sent)
            held = await self._held([engine], sent)
            now = sent.checksums or held[engine.engine_id]
            if sent.version == self._version:
                proof.check_same(sent, self._checksums, now)
            self._remember(sent, now)

    async def _held(self, engines: Sequence[EngineEndpoint], sent: SentWeights) -> dict[str, dict[str, str]]:
        """Checksums by engine, once they are found to be right: equal to the trainer's by name, or to each other's."""
        held = await lifecycle.checksums(engines)
        by_name = {e.engine_id: held[e.engine_id] for e in engines if e.kind == "torch"}
        proof.check_engines(sent, by_name)
        proof.check_agree(sent, {engine: found for engine, found in held.items() if engine not in by_name})
        return held

    def _remember(self, sent: SentWeights, checksums: Mapping[str, str]) -> None:
        self._checksums, self._version, self._restores = dict(checksums), sent.version, False

    async def _compare(self, engines: Sequence[EngineEndpoint]) -> None:
        try:
            await self._check(engines, "compare")
        except HttpError as error:
            raise WeightSyncError(
                "the first update did not restore the weights that the engines loaded, though the trainer loaded the same "
                f"folder: these parameters were not sent, or were sent with other values: {error}"
            ) from error

    async def _reload(self, engine: EngineEndpoint, sent: SentWeights, before: Mapping[str, str]) -> None:
        """(c): load the same weights another way, over garbage."""
        await self._check([engine], "reset_tensors")
        again = await self._source.send_weights([engine], sent.version, self._second_path)
        held = await lifecycle.checksums([engine])
        proof.check_versions(again, await lifecycle.versions([engine]))
        proof.check_same(again, sent.checksums, again.checksums)
        proof.check_reloaded(sent, before, held, self._second_path)

    async def _check(self, engines: Sequence[EngineEndpoint], action: str) -> None:
        calls = [lifecycle.control(e, "weights_checker", {"action": action}) for e in engines]
        await self._waits.on("engines", f"weights_checker {action}", asyncio.gather(*calls))
