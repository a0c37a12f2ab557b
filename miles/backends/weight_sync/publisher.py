"""`Publisher`: the driver's `WeightPublisher`. Owns the weight version."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from miles.backends.weight_sync import lifecycle, proof
from miles.backends.weight_sync.records import SentWeights, WeightSource
from miles.core.ports import Metrics, Placement, Tracker
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.errors import WeightSyncError
from miles.utils.waits import Waits


class Publisher:
    """Publishes the trainer's weights to all engines of one model and proves that they arrived.

    `on_version` is told each version once the engines hold it. `probe_interval` publishes lie between two comparisons of
    trainer and engine on fixed sequences; 0 never compares.
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
        verify: bool,
        probe_interval: int,
    ) -> None:
        self._source, self._router, self._engines, self._placement = source, router, list(engines), placement
        self._on_version, self._tracker, self._waits = on_version, tracker, waits
        self._verify, self._probe_interval = verify, probe_interval
        self._version, self._first_step = version, first_step
        self._published = 0
        self._checksums: dict[str, str] = {}

    @property
    def version(self) -> int:
        """Version that the engines hold; 0 before the first publish."""
        return self._version

    async def publish(self, after_step: int | None = None) -> Metrics:
        """Send the trainer's weights as the next version; `after_step` is None before the first step.

        Raises WeightSyncError when the engines do not hold them afterwards, ParityError when they do but score otherwise.
        """
        started_at = time.monotonic()
        version = self._version + 1
        async with self._placement.for_weight_sync():
            sent = await lifecycle.drained_update(
                self._router,
                self._engines,
                lambda: self._source.send_weights(self._engines, version),
                self._prove,
                self._waits,
            )
        self._version, self._checksums = version, dict(sent.checksums)
        await self._on_version(version)
        metrics = {
            "perf/update_weights_send_time": sent.seconds,
            "perf/update_weights_bytes": float(sum(sent.nbytes.values())),
            "rollout/published_version": float(version),
        }
        if self._probe_interval and self._published % self._probe_interval == 0:
            metrics |= await self._source.check_probes(self._engines[0], version)
        self._published += 1
        metrics["perf/update_weights_time"] = time.monotonic() - started_at
        self._tracker.log(self._first_step - 1 if after_step is None else after_step, metrics)
        return metrics

    async def publish_if_due(self, step: int) -> Metrics:
        """Publish after every step: a synchronous run always generates with the newest weights."""
        return await self.publish(step)

    async def _prove(self, sent: SentWeights) -> None:
        wrong = {e: v for e, v in (await lifecycle.versions(self._engines)).items() if v != str(sent.version)}
        if wrong:
            held = ", ".join(f"{engine} says {found}" for engine, found in wrong.items())
            raise WeightSyncError(f"weight update {sent.version} did not arrive: {held}")
        if self._verify:
            proof.check_sent(sent)
            proof.check_engines(sent, await lifecycle.checksums(self._engines))
            proof.check_changed(sent, self._checksums)
