"""`Publisher`: the driver's `WeightPublisher`. Owns the weight version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from miles.backends.weight_sync import lifecycle
from miles.backends.weight_sync.liveness import DEATH_NOTICE_S, is_alive, living
from miles.backends.weight_sync.records import SentWeights, TransportName, WeightSource
from miles.backends.weight_sync.verifier import Verifier
from miles.core.ports import Metrics, Placement, Tracker
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.errors import EngineError, MilesError
from miles.utils.waits import Waits


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofPlan:
    """Which proofs a run asks for."""

    verify: bool = True
    """Names, bytes and checksums of every update."""
    starts_from_folder: bool = False
    """The first publish sends what the engines loaded already, so that an update over garbage must restore it."""
    reload_interval: int = 0
    """Updates between two proofs through the second load path; 0 never."""
    transport: TransportName = "tensor"
    """The run's own transport; the second load path is another one."""
    shares_memory: bool = True
    """Whether the engines may be given weights through memory of this machine."""

    @property
    def second_path(self) -> TransportName:
        """The way by which weights are sent again, to be compared."""
        if self.transport != "disk":
            return "disk"
        return "tensor" if self.shares_memory else "broadcast"


class Publisher:
    """Publishes the trainer's weights to all engines of one model and proves that they arrived.

    `on_version` is told each version once the engines hold it, before they go on. `mode` says what becomes of requests
    in flight. `probe_interval` publishes lie between two comparisons of trainer and engine on fixed sequences; 0 never
    compares.

    Engines may come and go: `set_engines` replaces the list, `bring_up` gives the current weights to one engine that has
    just started. Publishing, `bring_up`, training and saving exclude each other through `trainer_lock`. With
    `tolerate_deaths` an engine that dies before or during a publish is left out, and the others get the new version; it
    is brought up later by whoever restarts it.
    """

    def __init__(
        self,
        source: WeightSource,
        router: RouterEndpoint,
        engines: Sequence[EngineEndpoint],
        placement: Placement,
        on_version: Callable[[int], Awaitable[None]],
        tracker: Tracker,
        waits: Waits,
        *,
        version: int,
        first_step: int,
        probe_interval: int,
        proofs: ProofPlan,
        mode: lifecycle.UpdateMode = "drain",
        tolerate_deaths: bool = False,
    ) -> None:
        self._source, self._router, self._engines, self._placement = source, router, list(engines), placement
        self._on_version, self._tracker, self._waits = on_version, tracker, waits
        self._verifier = Verifier(
            source,
            waits,
            enabled=proofs.verify,
            starts_from_folder=proofs.starts_from_folder,
            reload_interval=proofs.reload_interval,
            second_path=proofs.second_path,
        )
        self._probe_interval, self._tolerate_deaths = probe_interval, tolerate_deaths
        self._mode: lifecycle.UpdateMode = mode
        self._version, self._first_step = version, first_step
        self._published = 0
        self._published_at_batch: int | None = None

    @property
    def version(self) -> int:
        """Version that the engines hold; 0 before the first publish."""
        return self._version

    @property
    def engines(self) -> tuple[EngineEndpoint, ...]:
        """The engines that the next publish goes to."""
        return tuple(self._engines)

    @property
    def trainer_lock(self) -> asyncio.Lock:
        """Held by a publish, a `bring_up`, a train step and a save."""
        return self._source.lock

    def set_engines(self, engines: Sequence[EngineEndpoint]) -> None:
        """Replace the engines, from the next publish on: after a restart an engine has another URL and process id."""
        self._engines = list(engines)

    async def publish(self, after_step: int | None = None) -> Metrics:
        """Send the trainer's weights as the next version; `after_step` is None before the first step.

        Raises WeightSyncError when the engines do not hold them afterwards, ParityError when they do but score otherwise,
        and EngineError when an engine died, unless that is tolerated.
        """
        started_at = time.monotonic()
        async with self._source.lock:
            version = self._version + 1
            self._verifier.start_timing()
            async with self._placement.for_weight_sync():
                sent, engines = await self._update_living(version)
            self._version, self._published_at_batch = version, self._source.batches_trained
            if sent is None:
                await self._on_version(version)
            metrics: Metrics = {"rollout/published_version": float(version)}
            if sent is not None:
                metrics["perf/update_weights_send_time"] = sent.seconds
                metrics["perf/update_weights_bytes"] = float(sum(sent.nbytes.values()))
                metrics["perf/verify_weights_time"] = self._verifier.seconds
            if engines and self._probe_interval and self._published % self._probe_interval == 0:
                metrics |= await self._probe(engines[0], version)
            self._published += 1
        metrics["perf/update_weights_time"] = time.monotonic() - started_at
        self._tracker.log(self._first_step - 1 if after_step is None else after_step, metrics)
        return metrics

    async def publish_if_due(self, step: int) -> Metrics:
        """Publish after every step: a synchronous run always generates with the newest weights."""
        return await self.publish(step)

    async def bring_up(self, engine: EngineEndpoint) -> bool:
        """Give one engine that has just started the weights of the present version, and prove that it holds them.

        It touches neither the other engines nor the router, and `engine` need not be in the router or in the list of
        engines yet. Waits for a train step, save or publish that goes on. Returns False, with nothing sent, when the
        trainer holds no published version: before the first publish, or once it has trained since the last; the engine
        then gets its weights with the next publish. Raises WeightSyncError when the proof fails, EngineError when the
        engine dies.
        """
        async with self._source.lock:
            if self._published_at_batch != self._source.batches_trained:
                return False
            flush = lifecycle.control(engine, "flush_cache")
            await self._waits.on(engine.engine_id, "flush its cache", flush)
            async with self._placement.for_weight_sync():
                sent = await self._source.send_weights([engine], self._version)
                await self._waits.on(
                    engine.engine_id, f"prove weights {self._version}", self._verifier.prove_one(engine, sent)
                )
            return True

    async def _update_living(self, version: int) -> tuple[SentWeights | None, list[EngineEndpoint]]:
        """Update the engines; where deaths are tolerated, the living ones, again as long as one dies meanwhile.

        A failed attempt has taken all engines out of the router, so those that live are put back in the end.
        """
        engines, removed = list(self._engines), False
        if self._tolerate_deaths:
            engines = await living(engines)
        while engines:
            try:
                sent = await self._update(engines, version)
            except MilesError:
                await asyncio.sleep(DEATH_NOTICE_S)
                alive = await living(engines)
                if not self._tolerate_deaths or len(alive) == len(engines):
                    raise
                engines, removed = alive, True
                continue
            if removed:
                for engine in engines:
                    body = {"url": engine.url, "id": engine.engine_id}
                    await self._waits.on(
                        "router", "take the engines back", lifecycle.control(self._router, "add_worker", body)
                    )
            return sent, engines
        return None, []

    async def _update(self, engines: list[EngineEndpoint], version: int) -> SentWeights:
        async def send() -> SentWeights:
            await self._verifier.before(engines)
            return await self._source.send_weights(engines, version)

        async def prove(sent: SentWeights) -> None:
            await self._verifier.prove(engines, sent)
            await self._on_version(version)  # before dispatch goes on, so that requests after it name this version

        return await lifecycle.update(self._mode, self._router, engines, send, prove, self._waits)

    async def _probe(self, engine: EngineEndpoint, version: int) -> Metrics:
        try:
            await self._source.ask_probes(engine)
            async with self._placement.for_scoring():
                return await self._source.check_probes(engine, version)
        except EngineError:
            if self._tolerate_deaths and not await is_alive(engine):
                return {}
            raise
