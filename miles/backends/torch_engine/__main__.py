"""`python -m miles.backends.torch_engine`: load a model folder and serve it until told to stop."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Before torch is imported: waiting OpenMP threads sleep instead of spinning, since this engine shares its CPUs with
# the router, the trainer and its own HTTP thread.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import uvicorn

from miles.backends.torch_engine.model_folder import check_folder
from miles.backends.torch_engine.settings import EngineSettings, ServerSettings, parse_settings
from miles.errors import EngineError, MilesError
from miles.utils import heartbeat
from miles.utils.imports import without_collection
from miles.utils.process import die_with_parent, report_ready, watch_stdin

_GIL_INTERVAL_S = 0.0005


class _Server(uvicorn.Server):
    """A uvicorn server that says when it serves."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving, then report."""
        await super().startup(sockets=sockets)
        self._on_ready()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, the death of the parent, or (if asked) the end of standard input; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    settings, server_settings = parse_settings(argv)
    die_with_parent()
    if server_settings.exit_on_stdin_close:
        watch_stdin()
    try:
        serve(settings, server_settings)
    except MilesError as error:
        logging.getLogger(__name__).error("%s", error)
        if server_settings.ready_fd is not None:
            report_ready(server_settings.ready_fd, {"error": str(error)})
        return 1
    return 0


def serve(settings: EngineSettings, server_settings: ServerSettings) -> None:
    """Bind, load, report and serve. Raises EngineError when the engine cannot start."""
    sock = _bind(server_settings.host, server_settings.port)
    with sock:
        check_folder(Path(settings.model_path))
        with without_collection():
            from transformers.utils.logging import disable_progress_bar

            from miles.backends.torch_engine.engine import Engine
            from miles.backends.torch_engine.model import load_model
            from miles.backends.torch_engine.server import create_app

        disable_progress_bar()
        # Steps of a small model are shorter than the default interval for which a thread may keep the interpreter.
        sys.setswitchinterval(_GIL_INTERVAL_S)
        engine = Engine(load_model(settings), settings).start()
        app = create_app(engine, server_settings.api_key)
        config = uvicorn.Config(
            app, loop="uvloop", http="httptools", log_level="warning", access_log=False, timeout_graceful_shutdown=2
        )

        def ready() -> None:
            port = sock.getsockname()[1]
            heartbeat.start_as_child()
            logging.getLogger(__name__).info("serving %s on port %d", settings.model_path, port)
            if server_settings.ready_fd is not None:
                report_ready(server_settings.ready_fd, {"port": port, "pid": os.getpid()})

        try:
            _Server(config, ready).run(sockets=[sock])
        finally:
            engine.stop()


def _bind(host: str, port: int) -> socket.socket:
    """A listening address on `host` (name or IP literal); port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise EngineError(f"--host {host} cannot be resolved: {error.strerror}") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise EngineError(
            f"port {port} on {host} cannot be bound: {error.strerror}; choose another --port, or 0 for a free one"
        ) from error
    return sock


if __name__ == "__main__":
    sys.exit(main())
