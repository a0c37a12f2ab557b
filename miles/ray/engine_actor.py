"""`EngineActor`: starts one engine's server process, watches it, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Literal

from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.ray.actor_process import enter
from miles.utils.http_utils import url_of
from miles.utils.process import TOKEN_VARIABLE, ServerProcess, last_lines

WATCH_INTERVAL_S = 0.2


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is: the command that serves it, and the GPUs it may use, as CUDA_VISIBLE_DEVICES names them."""

    command: tuple[str, ...]
    kind: Literal["torch", "sglang"]
    gpus: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of the server needs. Ray hides the GPUs that it was not asked for, so they are named."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


class EngineActor:
    """Owns the server process of one engine. The process ends with this actor."""

    def __init__(self, engine_id: str, run_dir: str) -> None:
        enter(f"{engine_id}-actor", run_dir)
        self._id = engine_id
        self._log_path = os.path.join(run_dir, "logs", f"{engine_id}.log")
        self._server: ServerProcess | None = None
        self._stopping = False
        self._killed_because = ""

    async def start(self, spec: EngineSpec, token: str, timeout_s: float) -> tuple[EngineEndpoint, int]:
        """Start the server and wait until it serves; returns where, and the process id of this actor.

        Called again after the server has died; the log is appended to. Raises EngineError with the end of its log.
        """
        self._killed_because = ""
        environment = {TOKEN_VARIABLE: token, **spec.environment}
        self._server = ServerProcess(self._id, spec.command, self._log_path, env=environment)
        facts = await self._server.wait_ready_async(timeout_s)
        endpoint = EngineEndpoint(
            url=url_of("127.0.0.1", facts["port"]),
            engine_id=self._id,
            pid=self._server.pid,
            token=token,
            log_path=self._log_path,
            kind=spec.kind,
            tp=max(1, len(spec.gpus)),
            gpu_ids=spec.gpus,
        )
        return endpoint, os.getpid()

    async def watch(self) -> None:
        """Return once the server was stopped on purpose; raises EngineError when it ends by itself."""
        assert self._server is not None
        while (status := self._server.exit_code()) is None:
            await asyncio.sleep(WATCH_INTERVAL_S)
        if not self._stopping:
            how = f"was killed: it {self._killed_because}" if self._killed_because else how_it_ended(status)
            lines = last_lines(self._log_path)
            raise EngineError(
                f"the engine's process {how}", engine=self._id, log_path=self._log_path, last_lines=lines
            )

    async def kill(self, reason: str) -> None:
        """Kill the server, even one that is stopped or hangs; `watch` tells `reason`."""
        if self._server is not None and self._server.exit_code() is None:
            self._killed_because = reason
            os.kill(self._server.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the server."""
        self._stopping = True
        if self._server:
            await asyncio.to_thread(self._server.stop)
