"""Where an engine of the pool lives: in a server that the run starts, or in one that somebody else started."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import RayActorError

from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.ray.actor_process import spawn
from miles.ray.engine_actor import EngineActor, EngineSpec
from miles.utils import http_utils
from miles.utils.engine_facts import ExpectedServer, ServerFacts, differences, read_facts
from miles.utils.process import last_lines
from miles.utils.waits import OPEN

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0
"""Seconds an engine's actor may take to kill its server; the actor is killed then, and the server dies with it."""
LOOK_AGAIN_S = 1.0
"""Seconds between two looks whether a server that somebody else started is back."""
KEEPALIVE_S = 10
"""Seconds of silence after which the kernel asks whether the machine of a server is still there, and between questions."""
KEEPALIVE_COUNT = 3


class EngineGoneError(EngineError):
    """An engine does not come back, however often it is tried."""


class EngineHost(Protocol):
    """One engine over all its restarts."""

    @property
    def actor_pid(self) -> int:
        """Process id of the actor that owns the engine; 0 when the run does not own it."""
        ...

    async def launch(self) -> EngineEndpoint:
        """Have the engine serve; returns where. Raises EngineError."""
        ...

    async def death(self) -> EngineError:
        """Wait until the engine serves no more; returns why."""
        ...

    async def kill(self, reason: str) -> None:
        """Give up an engine that lives but does not answer; `death` tells `reason`."""
        ...

    async def stop(self) -> None:
        """The run needs the engine no more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEnginesPlan:
    """How the run starts engines of its own."""

    run_dir: str
    command: tuple[str, ...]
    kind: Literal["torch", "sglang"]
    gpus: tuple[tuple[str, ...], ...]
    """Of each engine, as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""
    token: str
    start_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEnginesPlan:
    """Which servers of others the run attaches to, and what they must be."""

    addresses: tuple[str, ...]
    token: str
    expected: ExpectedServer
    return_timeout_s: float
    """Seconds that a run without any engine waits for one of them to come back."""


class OwnEngine:
    """A server that an `EngineActor` starts and ends."""

    def __init__(self, plan: OwnEnginesPlan, number: int) -> None:
        self._plan, self._id = plan, f"engine-{number}"
        self._gpus = plan.gpus[number]
        self._log_path = os.path.join(plan.run_dir, "logs", f"{self._id}.log")
        self._actor: Any = None
        self.actor_pid = 0

    async def launch(self) -> EngineEndpoint:
        """As `EngineHost.launch`."""
        plan = self._plan
        if self._actor is None:
            self._actor = spawn(EngineActor, self._id, plan.run_dir, num_cpus=1)
        try:
            spec = EngineSpec(plan.command, plan.kind, self._gpus)
            start = self._actor.start.remote(spec, plan.token, plan.start_timeout_s)
            with OPEN.on(self._id, "start"):
                endpoint, self.actor_pid = await _ref(start)
        except RayActorError as error:
            raise self._actor_died() from error
        except EngineError as error:
            raise _unwrapped(error) from error
        return endpoint

    async def death(self) -> EngineError:
        """As `EngineHost.death`."""
        try:
            await _ref(self._actor.watch.remote())
        except RayActorError:
            return self._actor_died()
        except EngineError as error:
            return _unwrapped(error)
        raise AssertionError(f"{self._id} was stopped while the pool was open")

    async def kill(self, reason: str) -> None:
        """As `EngineHost.kill`."""
        if self._actor is None:
            return  # it is dead already
        try:
            await asyncio.wait_for(_ref(self._actor.kill.remote(reason)), KILL_TIMEOUT_S)
        except (TimeoutError, RayActorError):
            ray.kill(self._actor)

    async def stop(self) -> None:
        """End server and actor."""
        if self._actor is not None:
            await _ref(self._actor.stop.remote())

    def _actor_died(self) -> EngineError:
        ray.kill(self._actor)  # an actor that is only out of reach must not start a second server
        pid, self._actor = self.actor_pid, None
        return EngineError(
            f"the process that owns the engine (EngineActor, process {pid}) died, and the engine with it",
            engine=self._id,
            log_path=self._log_path,
            last_lines=last_lines(self._log_path),
        )


class ExternalEngine:
    """A server that somebody else started and that goes on when the run ends.

    At first it loads the run's model folder, whatever it held, and goes on if it was paused: it may have served another
    run. A connection on which nothing is said tells of its end.
    """

    actor_pid = 0

    def __init__(self, plan: ExternalEnginesPlan, number: int, others_serve: Callable[[], bool]) -> None:
        self._plan, self._id, self._address = plan, f"engine-{number}", plan.addresses[number]
        self._others_serve = others_serve
        self._attachments = 0
        self._given_up: asyncio.Future[str] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def launch(self) -> EngineEndpoint:
        """Attach; after the first time, as soon as the server is back."""
        if not self._attachments:
            return await self._attach()
        alone_since = time.monotonic()
        while True:
            try:
                return await self._attach()
            except EngineError as error:
                if self._others_serve():
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > self._plan.return_timeout_s:
                    raise self._gone(error) from error
            await asyncio.sleep(LOOK_AGAIN_S)

    async def death(self) -> EngineError:
        """As `EngineHost.death`."""
        host, port = http_utils.split_host_port(self._address)
        self._given_up = given_up = asyncio.get_running_loop().create_future()
        try:
            reader, self._writer = await asyncio.open_connection(host, port)
        except OSError as error:
            return self._error(f"accepts no connection: {error}")
        _ask_for_silence_that_lives(self._writer)
        closed = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait({closed, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hang_up()
            ended = closed.done()
            closed.cancel()
            await asyncio.gather(closed, return_exceptions=True)
        return self._error("has ended or closed its connection" if ended else given_up.result())

    async def kill(self, reason: str) -> None:
        """Do without the server until it answers again; it is not the run's to kill."""
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(reason)

    async def stop(self) -> None:
        """Leave the server as it is: it serves."""
        self._hang_up()

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _attach(self) -> EngineEndpoint:
        plan = self._plan
        with OPEN.on(self._id, f"answer at {self._address}"):
            facts = await asyncio.to_thread(read_facts, self._address, plan.token)
        found = list(differences(facts, plan.expected))
        if found:
            listed = "".join(f"\n    {one.problem}\n    fix: {one.fix}" for one in found)
            raise EngineGoneError(
                f"the server at {self._address} is not what the run expects:{listed}", engine=self._id
            )
        endpoint = self._endpoint(facts)
        await self._load_folder(endpoint)
        self._attachments = endpoint.attachment
        return endpoint

    def _endpoint(self, facts: ServerFacts) -> EngineEndpoint:
        return EngineEndpoint(
            url=f"http://{self._address}",
            engine_id=self._id,
            pid=facts.pid,
            token=self._plan.token,
            kind=facts.kind,
            tp=facts.tp,
            attachment=self._attachments + 1,
        )

    async def _load_folder(self, endpoint: EngineEndpoint) -> None:
        """Let the server hold and serve what the run starts from."""
        folder = os.path.abspath(self._plan.expected.model_folder)
        load = {"model_path": folder, "load_format": "auto", "flush_cache": True, "weight_version": "0"}
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        try:
            with OPEN.on(self._id, "load the model folder"):
                await http_utils.post(f"{endpoint.url}/continue_generation", {}, headers=headers, idempotent=True)
                await http_utils.post(
                    f"{endpoint.url}/update_weights_from_disk", load, headers=headers, idempotent=True
                )
        except EngineError as error:
            raise EngineError(
                f"the server at {self._address} does not load {folder}: {error}\n"
                "    fix: the servers must see the run's --hf-checkpoint under the same path, serve nobody else, and, "
                "where they have an admin key, --rollout-external-admin-key-env must name it",
                engine=self._id,
            ) from error

    def _error(self, what: str) -> EngineError:
        return EngineError(
            f"the server at {self._address} {what}\n"
            "    fix: the run does not own it: start it again there; it is given its weights then, also by a run that "
            "resumes with --load",
            engine=self._id,
        )

    def _gone(self, error: EngineError) -> EngineGoneError:
        return EngineGoneError(
            f"no engine is left, and the server at {self._address} was not back after {self._plan.return_timeout_s:.0f} s: "
            f"{error.message}\n    fix: start it again there, and go on with --load; cluster.start_timeout_s is how long a "
            "run without engines waits",
            engine=self._id,
        )


def hosts_of(
    plan: OwnEnginesPlan | ExternalEnginesPlan, count: int, others_serve: Callable[[int], bool]
) -> Sequence[EngineHost]:
    """The hosts of `count` engines; `others_serve(i)` says whether another than engine `i` serves."""
    if isinstance(plan, OwnEnginesPlan):
        return [OwnEngine(plan, i) for i in range(count)]
    return [ExternalEngine(plan, i, lambda i=i: others_serve(i)) for i in range(count)]


def _ask_for_silence_that_lives(writer: asyncio.StreamWriter) -> None:
    """Have the kernel notice when the machine at the other end is gone without a word."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        if hasattr(socket, name):  # not every system has them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _unwrapped(error: EngineError) -> EngineError:
    """The error of an actor's method, out of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, EngineError) else error


async def _ref(ref: Any) -> Any:
    """An object reference as a coroutine."""
    return await ref
