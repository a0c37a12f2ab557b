"""Process of one router: `python -m miles.router --port 0 --ready-fd FD ...`."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence

from miles.errors import EngineError
from miles.router.router import RouterSettings, serve
from miles.utils import heartbeat
from miles.utils.process import TOKEN_VARIABLE, die_with_parent, report_ready, watch_stdin

logger = logging.getLogger("miles.router")


def parse(arguments: Sequence[str] | None = None) -> tuple[RouterSettings, int | None, bool]:
    """Settings, ready descriptor and whether to watch standard input; defaults are those of RouterSettings."""
    default = RouterSettings()
    parser = argparse.ArgumentParser(prog="python -m miles.router", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--host", default=default.host, help="address to listen on")
    add("--port", type=int, default=default.port, help="0 takes a free one")
    add("--api-key", default=os.environ.get(TOKEN_VARIABLE, default.api_key), help="token of the control routes")
    add("--health-check-interval", type=float, default=default.health_check_interval_s, help="seconds")
    add("--health-check-timeout", type=float, default=default.health_check_timeout_s, help="seconds")
    add("--failure-threshold", type=int, default=default.failure_threshold, help="failures in a row")
    add("--max-connections", type=int, default=default.max_connections, help="requests in flight at all workers")
    add("--worker-wait", type=float, default=default.worker_wait_s, help="seconds without a healthy worker until 503")
    add("--ready-fd", type=int, help='descriptor that gets one line {"port", "pid"} or {"error"}')
    add("--exit-on-stdin-close", action="store_true", help="end when the owner's end of standard input closes")
    args = parser.parse_args(arguments)
    settings = RouterSettings(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        health_check_interval_s=args.health_check_interval,
        health_check_timeout_s=args.health_check_timeout,
        failure_threshold=args.failure_threshold,
        max_connections=args.max_connections,
        worker_wait_s=args.worker_wait,
    )
    return settings, args.ready_fd, args.exit_on_stdin_close


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files: a request in flight has two connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Serve until the owner goes or a signal ends the process."""
    settings, ready_fd, exit_on_stdin_close = parse()
    die_with_parent()
    if exit_on_stdin_close:
        watch_stdin()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _allow_open_files(4 * settings.max_connections + 1024)

    def on_ready(port: int) -> None:
        if exit_on_stdin_close:
            # Ctrl-C reaches every process of a terminal; this one is ended by its owner, after its requests.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        heartbeat.start_as_child()
        logger.info("router %d listens on %s port %d", os.getpid(), settings.host, port)
        if ready_fd is not None:
            report_ready(ready_fd, {"port": port, "pid": os.getpid()})

    try:
        serve(settings, on_ready)
    except EngineError as error:
        if ready_fd is not None:
            report_ready(ready_fd, {"error": str(error)})
        sys.exit(f"miles.router: {error}")
    except KeyboardInterrupt:
        logger.info("interrupted")


if __name__ == "__main__":
    main()
