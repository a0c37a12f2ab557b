"""`EnginePool`: the router and the engines of one served model, watched, and started again when they die.

```
serving --process or actor dies--> out of the router --> started again --> given weights (the driver) --> admitted
   '--fails its health checks--> killed --^                   '--max_restarts used up, or not wanted--> the run ends
```
An engine that somebody else started is waited for instead, and attached to again. A router that died starts again on its port, without workers: requests wait in it until the driver refills it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from miles.core.ports import Metrics
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.errors import EngineError
from miles.ray.engine_actor import WATCH_INTERVAL_S, how_it_ended
from miles.ray.engine_hosts import EngineGoneError, EngineHost, ExternalEnginesPlan, OwnEnginesPlan, hosts_of
from miles.utils import http_utils
from miles.utils.process import TOKEN_VARIABLE, ServerProcess, last_lines
from miles.utils.waits import OPEN

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 2.0
"""Seconds the router may take to strike a dead engine off its list; it finds out by itself otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What the pool starts, and what it does when something dies."""

    run_dir: str
    num_engines: int
    engines: OwnEnginesPlan | ExternalEnginesPlan
    router_command: tuple[str, ...]
    token: str
    """Bearer token of the router's control routes."""
    start_timeout_s: float
    health_check_interval_s: float
    failure_threshold: int
    restart: bool
    max_restarts: int
    """Restarts of one process without a finished step between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A process has died, and is being started again or waited for."""

    name: str
    pid: int
    error: str
    log_path: str
    external: bool = False
    """Whether somebody else has to start it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRestarted:
    """An engine serves again, with the weights of the model folder and outside the router."""

    engine: EngineEndpoint
    actor_pid: int
    seconds: float
    restarts: int
    """Restarts of this engine since the last finished step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRestarted:
    """The router serves again at its old address, without workers."""

    router: RouterEndpoint
    seconds: float
    restarts: int
    """Restarts of the router since the last finished step."""


PoolEvent = Died | EngineRestarted | RouterRestarted


@dataclass(slots=True, eq=False)
class _Engine:
    """One engine over all its restarts. `endpoint` is None while it does not serve."""

    id: str
    host: EngineHost
    endpoint: EngineEndpoint | None = None
    admitted: bool = False
    restarts: int = 0


class EnginePool:
    """Owns the router process and one `EngineActor` an engine. One event loop only."""

    def __init__(self, plan: PoolPlan) -> None:
        self._plan = plan
        hosts = hosts_of(plan.engines, plan.num_engines, self._others_serve)
        self._engines = [_Engine(f"engine-{i}", host) for i, host in enumerate(hosts)]
        self._external = isinstance(plan.engines, ExternalEnginesPlan)
        self._router: ServerProcess | None = None
        self._router_restarts = 0
        self._may_start, self._none_starts = asyncio.Event(), asyncio.Event()
        self._may_start.set()
        self._none_starts.set()
        self._starting = 0
        self._events: asyncio.Queue[PoolEvent | EngineError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._total_engine_restarts = self._total_router_restarts = 0

    # ---- start and end

    async def start_engines(self) -> tuple[EngineEndpoint, ...]:
        """Start every engine; returns once all serve. Raises EngineError."""
        return tuple(await asyncio.gather(*map(self._launch, self._engines)))

    async def start_router(self) -> RouterEndpoint:
        """Start the router. Raises EngineError."""
        return await self._launch_router(self._plan.router_command)

    async def watch(self) -> None:
        """Put the engines into the router, and look after all of them from now on."""
        for engine in self._engines:
            assert engine.endpoint is not None
            await self.admit([engine.endpoint])
        keepers: list[Coroutine[Any, Any, None]] = [self._keep(engine) for engine in self._engines]
        keepers += [self._keep_router(), self._check_health()]
        self._tasks = [asyncio.create_task(self._guard(keeper)) for keeper in keepers]

    async def close(self) -> None:
        """End the engines and the router."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(engine.host.stop() for engine in self._engines), return_exceptions=True)
        if self._router:
            await asyncio.to_thread(self._router.stop)

    def pids(self) -> dict[str, int]:
        """Process ids of what the run started, by name: `router`, `engine-0`, `engine-0-actor`, ..."""
        found = {"router": self._router.pid} if self._router else {}
        for engine in self._engines if not self._external else ():
            found[f"{engine.id}-actor"] = engine.host.actor_pid
            if engine.endpoint is not None:
                found[engine.id] = engine.endpoint.pid
        return found

    # ---- what the driver asks

    async def next_event(self) -> PoolEvent:
        """Wait for the next death or restart. Raises the EngineError of what died when it is not to be started again."""
        event = await self._events.get()
        if isinstance(event, EngineError):
            raise event
        return event

    async def serving(self) -> list[EngineEndpoint]:
        """Engines whose process serves, admitted or not."""
        return [engine.endpoint for engine in self._engines if engine.endpoint is not None]

    async def admit(self, engines: Sequence[EngineEndpoint]) -> None:
        """Put engines into the router. One that has died meanwhile stays out; its restart is another event."""
        for engine in self._engines:
            if engine.endpoint is not None and engine.endpoint in engines:
                engine.admitted = True
                await self._add_to_router(engine.endpoint)

    async def refill_router(self) -> None:
        """Put every admitted engine into a router that was started again."""
        await self.admit([e.endpoint for e in self._engines if e.endpoint is not None and e.admitted])

    async def hold_restarts(self) -> list[EngineEndpoint]:
        """Start no engine again from now on, after those that are starting; returns the engines that serve."""
        self._may_start.clear()
        await self._none_starts.wait()
        return await self.serving()

    async def allow_restarts(self) -> None:
        """Start engines again that died meanwhile, and from now on."""
        self._may_start.set()

    async def kill(self, engine_id: str, reason: str) -> None:
        """Kill an engine's process; it is started again as if it had died. One of somebody else's is only given up."""
        (engine,) = (e for e in self._engines if e.id == engine_id)
        await engine.host.kill(reason)

    def step_done(self) -> None:
        """A step is finished: restarts are counted from 0 again."""
        self._router_restarts = 0
        for engine in self._engines:
            engine.restarts = 0

    def metrics(self) -> Metrics:
        """Restarts since the run began."""
        return {
            "fault_tolerance/engine_restarts": float(self._total_engine_restarts),
            "fault_tolerance/router_restarts": float(self._total_router_restarts),
        }

    # ---- engines

    async def _launch(self, engine: _Engine) -> EngineEndpoint:
        engine.endpoint = await engine.host.launch()
        return engine.endpoint

    async def _launch_again(self, engine: _Engine) -> None:
        await self._may_start.wait()
        self._starting += 1
        self._none_starts.clear()
        try:
            await self._launch(engine)
        finally:
            self._starting -= 1
            if not self._starting:
                self._none_starts.set()

    def _others_serve(self, number: int) -> bool:
        return any(engine.endpoint is not None for i, engine in enumerate(self._engines) if i != number)

    async def _keep(self, engine: _Engine) -> None:
        """Start `engine` again whenever it dies."""
        while True:
            error = await engine.host.death()
            engine.endpoint, engine.admitted, gone = None, False, engine.endpoint
            self._say_died(engine.id, gone, error, engine.restarts)
            if gone is not None:
                await self._leave_router(gone)
            started_at = time.monotonic()
            while engine.endpoint is None:
                if not self._plan.restart or engine.restarts >= self._plan.max_restarts:
                    self._events.put_nowait(error)
                    return
                engine.restarts += 1
                self._total_engine_restarts += 1
                try:
                    await self._launch_again(engine)
                except EngineGoneError as gone_for_good:
                    self._events.put_nowait(gone_for_good)
                    return
                except EngineError as again:
                    error = again
            seconds = time.monotonic() - started_at
            event = EngineRestarted(
                engine=engine.endpoint, actor_pid=engine.host.actor_pid, seconds=seconds, restarts=engine.restarts
            )
            logger.info("%s serves again after %.1f s, process %d", engine.id, seconds, event.engine.pid)
            self._events.put_nowait(event)

    async def _leave_router(self, endpoint: EngineEndpoint) -> None:
        try:
            await self._router_call("remove_worker", {"url": endpoint.url}, deadline_s=LEAVE_TIMEOUT_S)
        except EngineError as error:
            logger.warning("%s was not removed from the router, which will find out: %s", endpoint.engine_id, error)

    async def _add_to_router(self, endpoint: EngineEndpoint) -> None:
        await self._router_call("add_worker", {"url": endpoint.url, "id": endpoint.engine_id})

    async def _check_health(self) -> None:
        """Kill engines that live but fail the router's health checks."""
        while True:
            await asyncio.sleep(self._plan.health_check_interval_s)
            try:
                workers = (await self._router_state())["workers"]
            except EngineError as error:
                logger.warning("the router does not tell how the engines are: %s", error)
                continue
            sick = {w["url"]: w["last_error"] for w in workers if w["failed_checks"] >= self._plan.failure_threshold}
            for engine in self._engines:
                if engine.endpoint is not None and engine.admitted and engine.endpoint.url in sick:
                    await self.kill(
                        engine.id, f"failed {self._plan.failure_threshold} health checks, {sick[engine.endpoint.url]}"
                    )

    # ---- router

    async def _launch_router(self, command: Sequence[str]) -> RouterEndpoint:
        log_path = os.path.join(self._plan.run_dir, "logs", "router.log")
        self._router = ServerProcess("router", command, log_path, env={TOKEN_VARIABLE: self._plan.token})
        with OPEN.on("router", "start"):
            facts = await self._router.wait_ready_async(self._plan.start_timeout_s)
        self._endpoint = RouterEndpoint(
            url=http_utils.url_of("127.0.0.1", facts["port"]),
            pid=self._router.pid,
            token=self._plan.token,
            log_path=log_path,
        )
        return self._endpoint

    async def _keep_router(self) -> None:
        """Start the router again, on its port, whenever it dies."""
        while True:
            assert self._router is not None
            while (status := self._router.exit_code()) is None:
                await asyncio.sleep(WATCH_INTERVAL_S)
            error = EngineError(
                f"the router's process {how_it_ended(status)}",
                engine="router",
                log_path=self._router.log_path,
                last_lines=last_lines(self._router.log_path),
            )
            self._say_died("router", self._endpoint, error, self._router_restarts)
            started_at, port = time.monotonic(), http_utils.split_host_port(self._endpoint.url)[1]
            while self._router.exit_code() is not None:
                if not self._plan.restart or self._router_restarts >= self._plan.max_restarts:
                    self._events.put_nowait(error)
                    return
                self._router_restarts += 1
                self._total_router_restarts += 1
                try:
                    await self._launch_router([*self._plan.router_command, "--port", str(port)])
                except EngineError as again:
                    error = again
            seconds = time.monotonic() - started_at
            logger.info("the router serves again after %.1f s, process %d", seconds, self._router.pid)
            self._events.put_nowait(
                RouterRestarted(router=self._endpoint, seconds=seconds, restarts=self._router_restarts)
            )

    async def _router_call(self, route: str, body: dict[str, Any], deadline_s: float | None = None) -> Any:
        url = f"{self._endpoint.url}/{route}"
        return await http_utils.post(url, body, headers=self._auth, idempotent=True, deadline_s=deadline_s)

    async def _router_state(self) -> dict[str, Any]:
        url, limit = f"{self._endpoint.url}/list_workers", self._plan.health_check_interval_s
        return await http_utils.get(url, headers=self._auth, deadline_s=limit)

    @property
    def _auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._plan.token}"}

    # ---- events

    def _say_died(
        self, name: str, gone: EngineEndpoint | RouterEndpoint | None, error: EngineError, restarts: int
    ) -> None:
        logger.error("%s", error)
        if self._plan.restart and restarts < self._plan.max_restarts:
            pid = gone.pid if gone else 0
            external = self._external and name != "router"
            self._events.put_nowait(
                Died(name=name, pid=pid, error=error.message, log_path=error.log_path, external=external)
            )

    async def _guard(self, keeper: Coroutine[Any, Any, None]) -> None:
        """Nobody is looked after by a task that broke, so what broke it ends the run."""
        try:
            await keeper
        except Exception as error:
            logger.exception("the supervision of engines and router broke")
            told = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            self._events.put_nowait(told)
