"""`EngineActor`: starts one engine's server process, watches it, ends it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from miles.core.run_facts import EngineEndpoint
from miles.ray.actor_process import enter
from miles.utils.http_utils import url_of
from miles.utils.process import TOKEN_VARIABLE, ServerProcess


class EngineActor:
    """Owns the server process of one engine. The process ends with this actor."""

    def __init__(self, engine_id: str, run_dir: str) -> None:
        enter(f"{engine_id}-actor", run_dir)
        self._id = engine_id
        self._log_path = os.path.join(run_dir, "logs", f"{engine_id}.log")
        self._server: ServerProcess | None = None

    def start(self, command: Sequence[str], token: str, timeout_s: float) -> EngineEndpoint:
        """Start the server and wait until it serves; raises EngineError with the end of its log otherwise."""
        server = ServerProcess(self._id, command, self._log_path, env={TOKEN_VARIABLE: token})
        self._server = server
        facts = server.wait_ready(timeout_s)
        return EngineEndpoint(
            url=url_of("127.0.0.1", facts["port"]),
            engine_id=self._id,
            pid=server.pid,
            token=token,
            log_path=self._log_path,
        )

    def stop(self) -> None:
        """End the server."""
        if self._server:
            self._server.stop()
