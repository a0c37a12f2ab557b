"""`python -m miles.backends.sglang_utils.serve --model-path FOLDER ...`: one stock SGLang server that ends with its owner.

It takes the flags of `sglang serve`, and three of its own: `--ready-fd`, `--exit-on-stdin-close`, `--cache-dir`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from miles.utils import heartbeat
from miles.utils.imports import without_collection, without_collection_until_run
from miles.utils.kernel_caches import keep_kernels_in
from miles.utils.process import TOKEN_VARIABLE, die_with_parent, report_ready, watch_stdin
from miles.utils.waits import ITSELF, OPEN

logger = logging.getLogger("miles.backends.sglang_utils.serve")

HOST = "127.0.0.1"
LISTEN_S = 60.0
FIRST_REQUEST_S = 600.0
"""Seconds that the first request may take: where no kernel was compiled before, it compiles some."""
ENVIRONMENT = {
    # A health check that generates would be a request in flight during an update.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # Beside a trainer, the ranks of an engine need not find equally much memory free.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, the death of the parent, or (if asked) the end of standard input; returns the exit status."""
    own = argparse.ArgumentParser(
        prog="python -m miles.backends.sglang_utils.serve", add_help=False, allow_abbrev=False
    )
    own.add_argument("--ready-fd", type=int, default=None)
    own.add_argument("--exit-on-stdin-close", action="store_true")
    own.add_argument("--cache-dir", type=Path, default=None)
    settings, rest = own.parse_known_args(argv)
    die_with_parent()
    if settings.exit_on_stdin_close:
        watch_stdin()
    prepare_environment(settings.cache_dir)
    heartbeat.start_as_child()
    with reserved_port(HOST) as port, ExitStack() as work:
        work.enter_context(OPEN.on(ITSELF, "imports SGLang"))

        def ready() -> None:
            facts: dict[str, Any] = {"port": port, "pid": os.getpid()}
            work.close()
            try:
                with OPEN.on(ITSELF, "answers its first request"):
                    warm_up(HOST, port)
            except (OSError, HTTPException, ValueError) as error:
                facts = {"error": f"its first request failed: {error}"}
            if settings.ready_fd is not None:
                report_ready(settings.ready_fd, facts)

        # Its own first request is a text, which not every tokenizer knows the letters of.
        words = [*rest, "--host", HOST, "--port", str(port), "--skip-server-warmup"]
        if token := os.environ.get(TOKEN_VARIABLE):
            words += ["--admin-api-key", token]
            keep_out_of_logs(token)

        with without_collection():
            from sglang.srt.entrypoints.http_server import launch_server  # pyright: ignore[reportMissingImports]
            from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]

        work.close()
        work.enter_context(OPEN.on(ITSELF, "loads the model"))
        launch_server(prepare_server_args(words), launch_callback=ready)
    return 0


def warm_up(host: str, port: int) -> None:
    """Have a few tokens generated, as soon as the server listens. Raises OSError, HTTPException or ValueError."""
    request = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4}}
    deadline = time.monotonic() + LISTEN_S
    while True:
        connection = HTTPConnection(host, port, timeout=FIRST_REQUEST_S)
        try:
            connection.request("POST", "/generate", json.dumps(request), {"Content-Type": "application/json"})
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"status {answer.status}, {text[:500]}")


def prepare_environment(cache_dir: Path | None) -> None:
    """Set what SGLang reads from its environment, where the user has not."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if cache_dir is not None:
        keep_kernels_in(cache_dir)


def keep_out_of_logs(secret: str) -> None:
    """Blank `secret` in whatever this process logs: SGLang logs all its arguments, and with them the token."""
    make_record = logging.getLogRecordFactory()

    def redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        if secret in message:
            record.msg, record.args = message.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(redacted)


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """A free port that stays this process's while it loads.

    The socket is bound and never listens: Linux gives such a port to nobody who asks for a free one, and lets a server
    that sets SO_REUSEADDR, as uvicorn does, bind it as well.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


if __name__ == "__mp_main__":
    # A process that SGLang spawns, its scheduler for one, imports all of it once more. A module `__main__` would not get here.
    without_collection_until_run()
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    sys.exit(main())
