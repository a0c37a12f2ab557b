"""A proxy that spreads requests over workers and passes bytes through untouched.

client -> Router -> take a worker (or wait: held, full, none healthy) -> one upstream request -> bytes back
not connected, or a generation whose connection broke before its answer -> next worker      client gone -> cancelled
anything else that was perhaps received -> 502, never repeated
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import uvicorn
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from miles.router.control import CONTROL_PATHS, control_app
from miles.router.workers import NoWorkerError, Worker, WorkerPool
from miles.utils.http_utils import (
    BREAK_ERRORS,
    GENERATION_PATHS,
    KEEP_ALIVE_S,
    MOST_BREAKS,
    NOT_SENT_ERRORS,
    REQUEST_ID,
    bind_socket,
    describe,
)
from miles.utils.waits import OPEN

logger = logging.getLogger(__name__)

# Headers of one connection, not of the message (RFC 9110, 7.6.1); lengths and host are made anew.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_NOT_RETURNED = _HOP_BY_HOP | {b"content-length"}

# Added by the client library unless it is told not to; a request must arrive as it was sent.
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
# Up to this size an answer is read whole before it is begun, so that a worker which dies meanwhile is a clean 502.
_READ_WHOLE_BYTES = 4 << 20
_MAX_HEADER_BYTES = 64 << 10
_FIRST_RETRY_PAUSE_S = 0.05
_LONGEST_RETRY_PAUSE_S = 1.0
_SHUTDOWN_GRACE_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of one router process."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    api_key: str = ""
    """Token of the control routes; empty asks for none."""
    health_check_interval_s: float = 10.0
    """Seconds from one round of health checks to the next."""
    health_check_timeout_s: float = 30.0
    """Seconds a worker may take to answer a health check."""
    failure_threshold: int = 3
    """Failures in a row after which a worker gets no requests until it answers a health check."""
    max_connections: int = 1024
    """Requests in flight at all workers together; further ones wait in the router."""
    worker_wait_s: float = 10.0
    """Seconds a request waits for a healthy worker before it is answered with 503."""
    connect_timeout_s: float = 5.0
    """Seconds a connection to a worker may take before the request goes to another one."""


class _ClientGone(Exception):
    """The client closed its connection."""


class _TryAnother(Exception):
    """A worker did not answer, and another one may be asked; `broken` when this one may have begun."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken


class Router:
    """The ASGI application: control routes through FastAPI, everything else forwarded."""

    def __init__(self, settings: RouterSettings, on_ready: Callable[[], None]) -> None:
        self._settings = settings
        self._on_ready = on_ready
        self.pool = WorkerPool(settings.failure_threshold, settings.max_connections)
        self._control = control_app(self.pool, settings.api_key)
        self._upstream: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["path"] in CONTROL_PATHS:
            await self._control(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    # ---- life

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        settings = self._settings
        self._upstream = upstream = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.max_connections, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTO_HEADERS,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            read_bufsize=1 << 20,
        )
        # A connection of its own for each check: it must not pass on one that was accepted long ago.
        prober = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=settings.health_check_timeout_s),
            trust_env=False,
        )
        checks = asyncio.create_task(self._check_health(prober), name="health checks")
        checks.add_done_callback(_end_with)
        await send({"type": "lifespan.startup.complete"})
        self._on_ready()
        await receive()
        checks.cancel()
        await asyncio.gather(checks, return_exceptions=True)
        await prober.close()
        await upstream.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _check_health(self, prober: aiohttp.ClientSession) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await asyncio.gather(*(self._check(prober, worker) for worker in self.pool.workers))
            await asyncio.sleep(max(0.0, started + self._settings.health_check_interval_s - loop.time()))

    async def _check(self, prober: aiohttp.ClientSession, worker: Worker) -> None:
        try:
            async with prober.get(f"{worker.url}/health", allow_redirects=False) as response:
                if response.status == 200:
                    self.pool.recovered(worker)
                else:
                    self.pool.failed(worker, f"GET /health answered {response.status}", check=True)
        except TimeoutError:
            reason = f"GET /health: no answer in {self._settings.health_check_timeout_s:g} s"
            self.pool.failed(worker, reason, check=True)
        except (aiohttp.ClientError, OSError) as error:
            self.pool.failed(worker, f"GET /health: {describe(error)}", check=True)

    # ---- forwarding

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request, and give up as soon as its client does."""
        try:
            body = await _read_body(receive)
        except _ClientGone:
            return
        task = asyncio.current_task()
        assert task is not None
        client_left = finished = False

        def on_next_message(_: asyncio.Future[Any]) -> None:
            nonlocal client_left
            if not finished:
                client_left = True
                task.cancel()

        # After the body the server has one thing left to tell: the client went away.
        next_message = asyncio.ensure_future(receive())
        next_message.add_done_callback(on_next_message)
        try:
            await self._dispatch(scope, body, send)
        except asyncio.CancelledError:
            if not client_left:
                raise
            task.uncancel()
        finally:
            finished = True
            next_message.cancel()

    async def _dispatch(self, scope: Scope, body: bytes, send: Send) -> None:
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        try:
            target = path.decode("ascii")
            headers = _request_headers(scope["headers"])
        except UnicodeDecodeError as error:
            return await _answer(send, 400, {"error": f"the request's path or headers cannot be forwarded: {error}"})
        if not target.startswith("/"):
            return await _answer(send, 400, {"error": f"{target!r} is not a path that can be forwarded"})

        breaks_left = MOST_BREAKS if scope["method"] == "POST" and scope["path"] in GENERATION_PATHS else 0
        tried: set[Worker] = set()
        pause_s, paused_s = _FIRST_RETRY_PAUSE_S, 0.0
        while True:
            worker = self.pool.take(tried)
            if worker is None and tried:
                # Each worker refused the connection: let them come back, or let the threshold put them away.
                if paused_s >= self._settings.worker_wait_s:
                    text = "no worker accepts connections; see last_error of each and look into the engines' logs"
                    return await self._unavailable(send, text)
                await asyncio.sleep(pause_s)
                paused_s += pause_s
                pause_s = min(2 * pause_s, _LONGEST_RETRY_PAUSE_S)
                tried.clear()
                continue
            if worker is None:
                try:
                    what = "release of dispatch" if self.pool.held else "a place at a healthy engine"
                    with OPEN.on("dispatch", what, request=headers.get(REQUEST_ID, "")):
                        worker = await self.pool.wait(self._settings.worker_wait_s)
                except NoWorkerError as error:
                    return await self._unavailable(send, error.message)
            try:
                with OPEN.on(worker.id or worker.url, scope["path"], request=headers.get(REQUEST_ID, "")):
                    await self._relay(worker, scope["method"], target, headers, body, send, breaks_left > 0)
                    return None
            except _TryAnother as error:
                breaks_left -= error.broken
            finally:
                self.pool.give_back(worker)
            tried.add(worker)

    async def _relay(
        self,
        worker: Worker,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes,
        send: Send,
        repeatable: bool,
    ) -> None:
        """Send the request to `worker` and its answer to the client.

        Raises _TryAnother when it was not sent, or is `repeatable` and its connection broke before the client got a byte.
        """
        assert self._upstream is not None
        begun = False
        try:
            async with self._upstream.request(
                method,
                URL(worker.url + target, encoded=True),
                data=body or None,
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status < 500:
                    self.pool.answered(worker)
                length = response.content_length
                start = {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": _response_headers(response.raw_headers),
                }
                if response.status in (204, 304):
                    content, length = b"", None
                elif method == "HEAD":
                    content = b""
                elif length is not None and length <= _READ_WHOLE_BYTES:
                    content = await response.read()
                    length = len(content)
                else:
                    content = None
                if length is not None:
                    start["headers"].append((b"content-length", b"%d" % length))
                begun = True
                await send(start)
                if content is None:
                    async for piece in response.content.iter_any():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": content or b""})
        except NOT_SENT_ERRORS as error:
            self.pool.failed(worker, describe(error))
            logger.warning("worker %s: %s; the request goes to another one", worker.name, describe(error))
            raise _TryAnother(broken=False) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = describe(error)
            self.pool.failed(worker, reason)
            if begun:
                # Without its end the answer reads as broken at the client: the server closes the connection.
                logger.warning("worker %s broke off its answer to %s: %s", worker.name, target, reason)
                return
            if repeatable and isinstance(error, BREAK_ERRORS):
                logger.warning("worker %s broke off %s (%s); it goes to another one", worker.name, target, reason)
                raise _TryAnother(broken=True) from error
            text = f"worker {worker.name} gave no answer to {method} {target}: {reason}; it may have been received, so it is not repeated: send it again if that is safe"
            logger.warning("%s", text)
            await _answer(send, 502, {"error": text, "worker": worker.url, "id": worker.id, "reason": reason})

    async def _unavailable(self, send: Send, text: str) -> None:
        logger.warning("503: %s", text)
        await _answer(send, 503, {"error": text, "workers": self.pool.describe()})


def _end_with(checks: asyncio.Task[None]) -> None:
    """A router without health checks must not look alive."""
    if not checks.cancelled() and (error := checks.exception()):
        logger.critical("health checks broke; the router ends", exc_info=error)
        signal.raise_signal(signal.SIGTERM)


async def _read_body(receive: Receive) -> bytes:
    message = await receive()
    pieces: list[bytes] = []
    while True:
        if message["type"] == "http.disconnect":
            raise _ClientGone
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        message = await receive()


def _dropped(named: Iterable[bytes], always: frozenset[bytes]) -> frozenset[bytes]:
    """Headers to leave out: those of `always`, and those that Connection headers name."""
    return always.union(token.strip().lower() for value in named for token in value.split(b","))


def _request_headers(raw: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    dropped = _dropped((value for name, value in raw if name == b"connection"), _NOT_FORWARDED)
    return CIMultiDict((name.decode("ascii"), value.decode()) for name, value in raw if name not in dropped)


def _response_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = [(name.lower(), value) for name, value in raw]
    dropped = _dropped((value for name, value in lower if name == b"connection"), _NOT_RETURNED)
    return [(name, value) for name, value in lower if name not in dropped]


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(settings: RouterSettings, on_ready: Callable[[int], None]) -> None:
    """Run a router until SIGTERM or SIGINT; `on_ready` gets the port once it serves.

    Raises EngineError when it cannot bind.
    """
    sock = bind_socket(settings.host, settings.port)
    port: int = sock.getsockname()[1]
    config = uvicorn.Config(
        Router(settings, lambda: on_ready(port)),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )
    uvicorn.Server(config).run(sockets=[sock])
