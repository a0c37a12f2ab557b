"""HTTP to engines, routers and services: JSON in and out, careful retries, addresses that also work for IPv6."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import random
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from miles.errors import EngineError

CONNECT_TIMEOUT_S = 10.0
"""Seconds one connection attempt may take."""
RETRY_WINDOW_S = 60.0
"""Seconds after which a call without a deadline of its own begins no further attempt."""
KEEP_ALIVE_S = 2.0
"""Seconds an idle connection is kept. Below the 5 s of a stock uvicorn server, so that a request is never written to a
connection which the server is closing: nobody could tell whether such a request was sent."""
GENERATION_PATHS = frozenset({"/generate", "/v1/chat/completions"})
"""Routes whose requests are sent again when their connection breaks before an answer: generation changes nothing at the
server, a server drops what was asked over a connection that closed, and the caller gets one answer."""
BREAK_ERRORS = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError, ConnectionError)
"""What aiohttp raises when a connection that was made is reset or closed. Time-outs are none: the server may be at it."""
MOST_BREAKS = 4
"""Broken connections of one request after which it is given up: it may be what kills the servers."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SHOWN_BODY_CHARS = 4000

REQUEST_ID = "X-Request-Id"
"""Header by which a request is told apart from others in the wait graph."""

# What aiohttp raises while it connects, when no byte of the request has been written.
NOT_SENT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class HttpError(EngineError):
    """A server answered with an error status; `body` is its text, `retry_after_s` the pause it asks for."""

    def __init__(self, status: int, body: str, url: str, retry_after_s: float = 0.0) -> None:
        self.status, self.body, self.url, self.retry_after_s = status, body, url, retry_after_s
        super().__init__(f"{url} answered {status}: {body[:_SHOWN_BODY_CHARS] or '(no text)'}")


class TransportError(EngineError):
    """No answer came; `sent` tells whether the server may have received the request, `broken` that the connection broke."""

    def __init__(self, url: str, reason: str, sent: bool, broken: bool = False) -> None:
        self.url, self.reason, self.sent, self.broken = url, reason, sent, broken
        state = "it may have been received" if sent else "it was not sent"
        super().__init__(f"no answer from {url} ({state}): {reason}; check that the server runs and its log")


def describe(error: BaseException) -> str:
    """Class and text of an error; many transport errors have no text of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# ---- addresses


def bracket_host(host: str) -> str:
    """The host as URLs want it: an IPv6 literal in brackets, everything else as it is."""
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]" if ":" in bare else bare


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """`scheme://host:port`, for HTTP and for `tcp://` init methods alike."""
    return f"{scheme}://{bracket_host(host)}:{port}"


def split_host_port(url: str) -> tuple[str, int]:
    """Host without brackets and port of an http(s) URL or a bare `host:port`. Raises EngineError when there is none."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise EngineError(f"{url!r} is not an address: {error}; write host:port, IPv6 as [host]:port") from error
    if not parts.hostname or port is None:
        raise EngineError(f"{url!r} is not an address; write host:port, IPv6 as [host]:port")
    return parts.hostname, port


def bind_socket(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening socket on `host` (a literal or a name, which is resolved here) and `port` (0 takes a free one).

    Raises EngineError when the port is in use or the address is not of this machine.
    """
    bare = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise EngineError(
            f"host {host!r} does not resolve ({error}); bind to an IP literal of this machine"
        ) from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} of {host} is in use; choose another port, or 0 for a free one"
        elif error.errno == errno.EACCES:
            problem = f"port {port} of {host} needs rights this process lacks; choose one above 1023, or 0"
        else:
            problem = f"cannot listen on {url_of(host, port, 'tcp')} ({error}); bind to an address of this machine"
        raise EngineError(problem) from error
    sock.setblocking(False)
    return sock


# ---- sessions


@dataclass
class _Sessions:
    """The sessions of one event loop: for this machine and its network, and for the world (which may need a proxy)."""

    by_trust_env: dict[bool, aiohttp.ClientSession] = field(default_factory=dict)
    is_near: dict[str, bool] = field(default_factory=dict)


_sessions: dict[asyncio.AbstractEventLoop, _Sessions] = {}


def _literal_is_near(address: str) -> bool:
    return not ipaddress.ip_address(address.partition("%")[0]).is_global


async def _is_near(host: str, known: dict[str, bool]) -> bool:
    """Whether a host is this machine or in its private network, where a proxy of the environment has no business."""
    if not urllib.request.getproxies():
        return True  # no proxy to be caught by, so no name is looked up
    if host not in known:
        try:
            known[host] = _literal_is_near(host)
        except ValueError:
            if "." not in host or host.endswith((".localhost", ".local", ".internal")):
                known[host] = True
            else:
                try:
                    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
                except socket.gaierror:
                    return False  # only the proxy may know the name; asked again next time
                known[host] = all(_literal_is_near(str(entry[4][0])) for entry in found)
    return known[host]


async def _session_for(url: str) -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        for ended in [other for other in _sessions if other.is_closed()]:
            del _sessions[ended]
        _sessions[loop] = _Sessions()
    sessions = _sessions[loop]
    trust_env = not await _is_near(split_host_port(url)[0], sessions.is_near)
    session = sessions.by_trust_env.get(trust_env)
    if session is None or session.closed:
        session = aiohttp.ClientSession(
            trust_env=trust_env,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        sessions.by_trust_env[trust_env] = session
    return session


async def aclose() -> None:
    """Close the connections that this event loop has used."""
    sessions = _sessions.pop(asyncio.get_running_loop(), None)
    if sessions:
        for session in sessions.by_trust_env.values():
            await session.close()


# ---- calls


async def post(
    url: str,
    payload: Any,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    idempotent: bool = False,
    deadline_s: float | None = None,
) -> Any:
    """POST `payload` as JSON; returns the decoded answer (None when empty, text when it is not JSON).

    `timeout_s` limits one attempt, `deadline_s` the whole call with its retries and pauses. Without a deadline the
    call waits for an answer as long as it takes, and begins no new attempt after 60 s. Attempts are repeated when the
    connection could not be made or the server answered 429; with `idempotent` also when the answer was lost or 5xx. A
    generation (`GENERATION_PATHS`) is sent again when its connection broke, never after a time-out; the 60 s begin anew
    then. Raises HttpError with the server's text, or TransportError.
    """
    body = b"" if payload is None else orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    sent_headers = {"Content-Type": "application/json", **(headers or {})}
    return await _call("POST", url, body, sent_headers, timeout_s, idempotent, deadline_s)


async def post_once(url: str, payload: Any, *, timeout_s: float) -> Any:
    """One attempt of `post`, for callers that choose another server themselves before they try again; errors as there."""
    body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    session = await _session_for(url)
    return await _attempt(session, "POST", url, body, {"Content-Type": "application/json"}, timeout_s, None)


async def post_stream(
    url: str,
    payload: Any,
    on_event: Callable[[Any], None],
    *,
    headers: Mapping[str, str] | None = None,
    deadline_s: float | None = None,
) -> None:
    """POST `payload` as JSON and hand each server-sent event of the answer, decoded, to `on_event`, in order.

    Returns at the event `[DONE]`. Attempts are repeated as for `post`, and never once an event has come. Raises
    HttpError with the server's text, TransportError when the stream breaks off, and EngineError when an event is no
    JSON or tells an error.
    """

    async def read(response: aiohttp.ClientResponse) -> None:
        begun = False
        try:
            async for event in _events(response.content, url):
                begun = True
                if isinstance(event, dict) and "error" in event:
                    raise EngineError(f"{url} ended its stream with an error: {_error_text(event['error'])}")
                on_event(event)
        except BREAK_ERRORS as error:
            if not begun:
                raise
            raise TransportError(url, f"the stream broke off: {describe(error)}", sent=True) from error

    body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    sent_headers = {"Content-Type": "application/json", **(headers or {})}
    await _call("POST", url, body, sent_headers, None, False, deadline_s, read)


async def get(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    deadline_s: float | None = None,
) -> Any:
    """GET, always repeatable; answers and errors as for `post`.

    Without a deadline the whole call may take 60 s, or `timeout_s` where that is longer.
    """
    if deadline_s is None:
        deadline_s = max(RETRY_WINDOW_S, timeout_s or 0.0)
    return await _call("GET", url, b"", dict(headers or {}), timeout_s, True, deadline_s)


async def _call(
    method: str,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout_s: float | None,
    idempotent: bool,
    deadline_s: float | None,
    read: Callable[[aiohttp.ClientResponse], Awaitable[Any]] | None = None,
) -> Any:
    """Attempts until one is answered or must not be repeated; `read` takes the answer, in place of decoding it whole."""
    started = time.monotonic()
    ends = started + (RETRY_WINDOW_S if deadline_s is None else deadline_s)
    breaks_left = MOST_BREAKS if method == "POST" and urlsplit(url).path in GENERATION_PATHS else 0
    pause_s = _FIRST_PAUSE_S
    said: HttpError | None = None

    async def read_begun(response: aiohttp.ClientResponse) -> Any:
        nonlocal breaks_left
        breaks_left = 0  # what was passed on must not come again
        assert read is not None
        return await read(response)

    session = await _session_for(url)
    while True:
        limits = [timeout_s, None if deadline_s is None else max(0.001, started + deadline_s - time.monotonic())]
        total_s = min((limit for limit in limits if limit is not None), default=None)
        asked_pause_s = 0.0
        try:
            return await _attempt(session, method, url, body, headers, total_s, read and read_begun)
        except HttpError as error:
            if error.status != 429 and not (idempotent and error.status >= 500):
                raise
            failure = said = error
            asked_pause_s = error.retry_after_s
        except TransportError as error:
            if error.broken and breaks_left:
                breaks_left -= 1
                if deadline_s is None:  # what went before was an attempt at work, not at getting through
                    ends = time.monotonic() + RETRY_WINDOW_S
            elif error.sent and not idempotent:
                raise
            failure = said or error  # what a server said tells more than that it was silent at last
        # Full jitter: callers that failed together do not come back together.
        wait_s = max(asked_pause_s, pause_s * random.uniform(0.5, 1.5))
        if time.monotonic() + wait_s >= ends:
            raise failure
        await asyncio.sleep(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _attempt(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    total_s: float | None,
    read: Callable[[aiohttp.ClientResponse], Awaitable[Any]] | None,
) -> Any:
    timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S)
    try:
        async with session.request(method, url, data=body or None, headers=headers, timeout=timeout) as response:
            if read is not None and response.status < 400:
                return await read(response)
            content = await response.read()
            if response.status >= 400:
                asked = response.headers.get("Retry-After", "")
                text = content.decode(errors="replace")
                raise HttpError(response.status, text, url, float(asked) if asked.isdecimal() else 0.0)
            return _decode(content, response.content_type, url)
    except NOT_SENT_ERRORS as error:
        raise TransportError(url, describe(error), sent=False) from error
    except TimeoutError as error:
        raise TransportError(url, f"no whole answer within {total_s} s", sent=True) from error
    except BREAK_ERRORS as error:
        raise TransportError(url, describe(error), sent=True, broken=True) from error
    except (aiohttp.ClientError, OSError) as error:
        raise TransportError(url, describe(error), sent=True) from error


async def _events(content: aiohttp.StreamReader, url: str) -> AsyncIterator[Any]:
    """The decoded events of a stream of `data: JSON` events, up to `data: [DONE]`."""
    buffer, searched = bytearray(), 0
    async for piece in content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n\n", searched)) >= 0:
            event, searched = bytes(buffer[:end]).strip(), 0
            del buffer[: end + 2]
            if event == b"data: [DONE]":
                return
            if event.startswith(b"data:"):
                yield _decode(event.removeprefix(b"data:"), "application/json", url)
        searched = max(0, len(buffer) - 1)
    raise TransportError(url, "the stream ended before its last event", sent=True)


def _error_text(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _decode(content: bytes, content_type: str, url: str) -> Any:
    if not content:
        return None
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        text = content.decode(errors="replace")
        if content_type.endswith("json"):
            raise EngineError(f"{url} answered something that is not JSON ({error}): {text[:500]}") from error
        return text
