"""`Recovery`: the driver's side of engines and a router that died: current weights, proof, admission, and what is told.

The manager's `EnginePool` starts them again; what they must hold only the driver knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from ray.exceptions import RayError

from miles.core.ports import Metrics, WeightPublisher
from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError, MilesError, WeightSyncError
from miles.ray.engine_pool import Died, EngineRestarted, PoolEvent, RouterRestarted
from miles.ray.phases import PhaseLog
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.events import EventLog
from miles.utils.waits import Waits

DEATH_NOTICE_S = 2.0
"""Seconds from a call that failed until the death of the process that it went to must have been seen."""


class Weights(WeightPublisher, Protocol):
    """What gives engines their weights, also one engine alone."""

    def set_engines(self, engines: Sequence[EngineEndpoint]) -> None: ...

    async def bring_up(self, engine: EngineEndpoint) -> bool: ...


class Recovery:
    """Follows the pool's events beside the loop, and is the loop's `WeightPublisher`: an update goes on after deaths."""

    def __init__(
        self,
        manager: Any,
        weights: Weights,
        waits: Waits,
        console: Console,
        events: EventLog,
        phases: PhaseLog,
        *,
        trainer_leaves: bool = False,
    ) -> None:
        """`trainer_leaves`: the trainer is away while engines generate, and has no room to come back meanwhile."""
        self._trainer_leaves = trainer_leaves
        self._manager, self._weights, self._waits = manager, weights, waits
        self._console, self._log, self._phases = console, events, phases
        self._unpublished: dict[str, EngineEndpoint] = {}
        self._router_deaths = 0
        self._whole_update = asyncio.Lock()
        """Held from the first attempt of an update to the one that succeeds: engines between hold anything."""
        self._task: asyncio.Task[None] | None = None

    async def _pool(self, wait: str, method: str, *args: Any) -> Any:
        return await self._waits.on("rollout manager", wait, self._manager.pool.remote(method, *args))

    # ---- beside the loop

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Recover while the block runs; what cannot be recovered ends the block with its own error."""
        loop_task = asyncio.current_task()
        assert loop_task is not None
        self._task = task = asyncio.create_task(self._follow(), name="recovery")
        interrupted = False

        def interrupt(ended: asyncio.Task[None]) -> None:
            nonlocal interrupted
            if not ended.cancelled():
                interrupted = True
                loop_task.cancel()

        task.add_done_callback(interrupt)
        try:
            yield
        except asyncio.CancelledError:
            if interrupted and loop_task.uncancel() == 0 and (error := task.exception()):
                raise error from None
            raise
        except (EngineError, WeightSyncError) as error:
            # A call to a process that died fails before its death is seen, and the death is the better explanation.
            task.remove_done_callback(interrupt)
            await asyncio.wait({task}, timeout=DEATH_NOTICE_S)
            if task.done() and not task.cancelled() and (death := task.exception()):
                raise death from error
            raise
        finally:
            task.remove_done_callback(interrupt)
            task.cancel()
            await asyncio.wait({task})

    async def _follow(self) -> None:
        while True:
            event: PoolEvent = await self._manager.pool.remote("next_event")
            if isinstance(event, Died):
                fate = "is lost until somebody starts it again" if event.external else "died and is started again"
                self._console.say(f"  {event.name} {fate}: {event.error}", style="yellow")
                if event.external:  # it may live and hang, and an update must not wait for it
                    self._weights.set_engines(await self._pool("the engines that serve", "serving"))
                kind = "router" if event.name == "router" else "engine"
                self._router_deaths += kind == "router"
                self._log.add(f"{kind} died", name=event.name, pid=event.pid, error=event.error, log=event.log_path)
            elif isinstance(event, EngineRestarted):
                await self._bring_back(event)
            else:
                await self._refill(event)

    async def _bring_back(self, event: EngineRestarted) -> None:
        engine = event.engine
        # Before anything is awaited: the next publish, whenever it comes, knows the engine and admits it.
        self._unpublished[engine.engine_id] = engine
        serving = await self._pool("the engines that serve", "serving")
        self._weights.set_engines(serving)
        try:
            # The others go on, on memory that the trainer would need to send its weights.
            holds = (not self._trainer_leaves or len(serving) == 1) and await self._weights.bring_up(engine)
        except (MilesError, RayError):
            if await self._has_died(engine):
                return  # its next restart is another event
            raise
        if holds:
            await self._admit([engine])
            state = f"with weights {self._weights.version}"
        else:
            state = "and gets its weights with the next update"
        self._console.say(f"  {engine.engine_id} serves again after {event.seconds:.1f} s, {state}", style="green")
        self._log.add(
            "engine restarted",
            name=engine.engine_id,
            pid=engine.pid,
            actor_pid=event.actor_pid,
            seconds=round(event.seconds, 3),
            version=self._weights.version if holds else None,
            restarts=event.restarts,
            log=engine.log_path,
        )

    async def _refill(self, event: RouterRestarted) -> None:
        """A new router has no workers, so it dispatches nothing until no update goes on that could be half done."""
        async with self._whole_update:
            await self._pool("refill the router", "refill_router")
        self._console.say(f"  the router serves again after {event.seconds:.1f} s", style="green")
        self._log.add(
            "router restarted",
            name="router",
            pid=event.router.pid,
            seconds=round(event.seconds, 3),
            restarts=event.restarts,
            log=event.router.log_path,
        )

    async def _admit(self, engines: Sequence[EngineEndpoint]) -> None:
        await self._pool("admit engines", "admit", list(engines))
        for engine in engines:
            if self._unpublished.get(engine.engine_id) == engine:
                del self._unpublished[engine.engine_id]

    async def _has_died(self, engine: EngineEndpoint) -> bool:
        await asyncio.sleep(DEATH_NOTICE_S)
        return engine not in await self._pool("the engines that serve", "serving")

    # ---- WeightPublisher

    @property
    def version(self) -> int:
        """Version that the engines hold."""
        return self._weights.version

    async def publish(self) -> Metrics:
        """Publish before the first step."""
        return await self._whole(None, self._weights.publish)

    async def publish_if_due(self, step: int) -> Metrics:
        """Publish after `step` if this run does so then."""
        return await self._whole(step, lambda: self._weights.publish_if_due(step))

    async def _whole(self, step: int | None, update: Callable[[], Awaitable[Metrics]]) -> Metrics:
        """Update, and again when the router died meanwhile. Engines that were started again serve from now on."""
        self._phases.begin("publish", step)
        async with self._whole_update:
            while True:
                included, deaths = list(self._unpublished.values()), self._router_deaths
                try:
                    metrics = await update()
                except MilesError:
                    await asyncio.sleep(DEATH_NOTICE_S)
                    if self._router_deaths == deaths:
                        raise
                    self._log.add("weight update repeated", step=step)
                    continue
                if included:
                    await self._admit(included)
                return metrics


class PoolRestarts:
    """Lets the pool wait with the restarts of engines until there is room for them."""

    def __init__(self, manager: Any, waits: Waits) -> None:
        self._manager, self._waits = manager, waits

    async def hold(self) -> Sequence[EngineEndpoint]:
        """Start no engine again from now on, after those that are starting; returns the engines that serve."""
        held = self._manager.pool.remote("hold_restarts")
        return await self._waits.on("rollout manager", "engines that are starting", held)

    async def allow(self) -> None:
        """Start engines again that died meanwhile, and from now on."""
        allowed = self._manager.pool.remote("allow_restarts")
        await self._waits.on("rollout manager", "restarts to go on", allowed)
