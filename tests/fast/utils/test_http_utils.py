from __future__ import annotations

import asyncio
import pickle
import re
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.errors import EngineError
from miles.utils import http_utils
from miles.utils.http_utils import (
    MOST_BREAKS,
    HttpError,
    TransportError,
    aclose,
    bind_socket,
    bracket_host,
    get,
    post,
    split_host_port,
    url_of,
)

OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{"a":1}'


def _error(status: int, text: str, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status} Error\r\n{extra}content-length: {len(text)}\r\n\r\n{text}".encode()


class Server:
    """Answers the i-th request with the i-th of `answers` (the last one again and again); None stays silent."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = answers
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
                answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
                self.requests.append((head, body))
                if answer is None:
                    await asyncio.sleep(5)
                else:
                    writer.write(answer)
                if not answer:
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # the client or the loop closes
        finally:
            writer.close()


def run(server: Server, story: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        sock = bind_socket("127.0.0.1", 0)
        url = url_of(*sock.getsockname()[:2])
        listening = await asyncio.start_server(server.handle, sock=sock)
        try:
            await story(url)
        finally:
            await aclose()
            listening.close()

    asyncio.run(main())


async def _fails(call: Awaitable[Any], kind: type[EngineError]) -> Any:
    with pytest.raises(kind) as caught:
        await call
    return caught.value


def test_post_sends_json_with_headers_and_decodes_the_answer() -> None:
    server = Server(OK)

    async def story(url: str) -> None:
        payload = {"ids": np.arange(3), "text": "ä"}
        assert await post(f"{url}/generate", payload, headers={"Authorization": "Bearer t"}) == {"a": 1}

    run(server, story)
    ((head, body),) = server.requests
    assert head.startswith("POST /generate HTTP/1.1")
    assert "Authorization: Bearer t" in head
    assert "Content-Type: application/json" in head
    assert body == '{"ids":[0,1,2],"text":"ä"}'.encode()


def test_empty_and_plain_text_answers_are_returned_as_they_are() -> None:
    texts = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 14\r\n\r\nCache flushed."
    server = Server(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", texts)

    async def story(url: str) -> None:
        assert await get(url) is None
        assert await post(url, None) == "Cache flushed."

    run(server, story)
    assert server.requests[1][1] == b""


def test_json_that_does_not_parse_is_an_error_with_the_text() -> None:
    async def story(url: str) -> None:
        error = await _fails(post(url, {}), EngineError)
        assert "not JSON" in str(error)
        assert "NaN]" in str(error)

    run(Server(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n[NaN]"), story)


# Case F01.
def test_a_read_timeout_of_a_generation_is_not_repeated() -> None:
    server = Server(None)

    async def story(url: str) -> None:
        error = await _fails(post(f"{url}/generate", {}, timeout_s=0.1), TransportError)
        assert error.sent
        assert "(it may have been received)" in str(error)
        assert "0.1 s" in str(error)

    run(server, story)
    assert len(server.requests) == 1


def test_a_lost_answer_is_not_repeated() -> None:
    server = Server(b"")

    async def story(url: str) -> None:
        assert (await _fails(post(f"{url}/judge", {}), TransportError)).sent

    run(server, story)
    assert len(server.requests) == 1


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_generation_whose_connection_breaks_is_sent_again_and_answered_once(path: str) -> None:
    server = Server(b"", b"", OK)

    async def story(url: str) -> None:
        assert await post(f"{url}{path}", {"rid": 1}) == {"a": 1}

    run(server, story)
    assert [body for _, body in server.requests] == [b'{"rid":1}'] * 3


def test_a_generation_that_breaks_its_connection_each_time_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr("miles.utils.http_utils._FIRST_PAUSE_S", 0.001)
    server = Server(b"")

    async def story(url: str) -> None:
        assert (await _fails(post(f"{url}/generate", {}), TransportError)).broken

    run(server, story)
    assert len(server.requests) == 1 + MOST_BREAKS


# Case F01.
def test_a_refused_connection_is_tried_again() -> None:
    async def main() -> None:
        sock = bind_socket("127.0.0.1", 0)
        address = sock.getsockname()[:2]
        sock.close()
        server = Server(OK)
        call = asyncio.create_task(post(url_of(*address), {}))
        await asyncio.sleep(0.05)
        assert not call.done()
        listening = await asyncio.start_server(server.handle, sock=bind_socket(*address))
        assert await call == {"a": 1}
        assert len(server.requests) == 1
        await aclose()
        listening.close()

    asyncio.run(main())


def test_a_server_that_stays_away_is_an_error_at_the_deadline() -> None:
    async def main() -> None:
        sock = bind_socket("127.0.0.1", 0)
        url = url_of(*sock.getsockname()[:2])
        sock.close()
        started = time.monotonic()
        error = await _fails(post(url, {}, deadline_s=0.4), TransportError)
        assert time.monotonic() - started < 2
        assert not error.sent
        assert f"no answer from {url} (it was not sent)" in str(error)
        await aclose()

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_client_error_is_raised_at_once_with_the_servers_text(status: int) -> None:
    server = Server(_error(status, "max_new_tokens is negative"))

    async def story(url: str) -> None:
        for call in (post(url, {}, idempotent=True), get(url)):
            error = await _fails(call, HttpError)
            assert (error.status, error.body, error.url) == (status, "max_new_tokens is negative", url)
            assert str(error) == f"{url} answered {status}: max_new_tokens is negative"

    run(server, story)
    assert len(server.requests) == 2


# Case F01: health and GET.
def test_5xx_is_repeated_for_idempotent_calls_only() -> None:
    server = Server(_error(503, "starting"), _error(500, "still"), OK)

    async def story(url: str) -> None:
        assert (await _fails(post(url, {}), HttpError)).status == 503
        assert await post(url, {}, idempotent=True) == {"a": 1}
        assert len(server.requests) == 3

    run(server, story)


def test_429_is_repeated_after_the_pause_it_asks_for() -> None:
    server = Server(_error(429, "busy", "retry-after: 1\r\n"), OK)

    async def story(url: str) -> None:
        started = time.monotonic()
        assert await post(url, {}) == {"a": 1}
        assert time.monotonic() - started >= 1

    run(server, story)


@pytest.mark.parametrize("asked", ["²", "soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_pause_that_is_no_number_of_seconds_is_ours_to_choose(asked: str) -> None:
    server = Server(_error(429, "busy", f"retry-after: {asked}\r\n"), OK)

    async def story(url: str) -> None:
        assert await post(url, {}) == {"a": 1}

    run(server, story)


def test_the_deadline_ends_retries_and_a_silent_answer_alike() -> None:
    async def story(url: str) -> None:
        started = time.monotonic()
        assert (await _fails(get(url, deadline_s=0.3), HttpError)).status == 500
        assert time.monotonic() - started < 2

    run(Server(_error(500, "no")), story)

    async def silent(url: str) -> None:
        started = time.monotonic()
        await _fails(get(url, deadline_s=0.3), TransportError)
        assert time.monotonic() - started < 2

    run(Server(None), silent)

    async def then_silent(url: str) -> None:
        error = await _fails(get(url, deadline_s=0.5), HttpError)
        assert error.body == "4 requests are still in flight"

    run(Server(_error(504, "4 requests are still in flight"), None), then_silent)


def test_a_longer_timeout_of_a_get_is_not_cut_by_the_default_deadline(monkeypatch) -> None:
    monkeypatch.setattr(http_utils, "RETRY_WINDOW_S", 0.1)
    waited: list[float] = []

    async def story(url: str) -> None:
        for timeout_s in (0.5, None):
            started = time.monotonic()
            await _fails(get(url, timeout_s=timeout_s), TransportError)
            waited.append(time.monotonic() - started)

    run(Server(None), story)
    assert waited[0] >= 0.5
    assert waited[1] < 0.5


@pytest.mark.parametrize(
    ("proxy_variables", "host", "near"),
    [
        ({}, "example.org", True),
        ({"http_proxy": "http://127.0.0.1:9"}, "127.0.0.1", True),
        ({"http_proxy": "http://127.0.0.1:9"}, "10.1.2.3", True),
        ({"http_proxy": "http://127.0.0.1:9"}, "fd00::1", True),
        ({"http_proxy": "http://127.0.0.1:9"}, "node-3", True),
        ({"http_proxy": "http://127.0.0.1:9"}, "localhost", True),
        ({"http_proxy": "http://127.0.0.1:9"}, "8.8.8.8", False),
    ],
)
def test_only_hosts_of_the_world_use_a_proxy(monkeypatch, proxy_variables, host, near) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in proxy_variables.items():
        monkeypatch.setenv(name, value)

    async def main() -> None:
        session = await http_utils._session_for(url_of(host, 80))
        assert session.trust_env == (not near)
        await aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("addresses", "near"), [(["10.0.0.1", "fd00::1"], True), (["10.0.0.1", "8.8.8.8"], False), (None, False)]
)
def test_a_name_is_near_when_all_its_addresses_are_private(monkeypatch, addresses, near) -> None:
    def lookup(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if addresses is None:
            raise socket.gaierror("unknown name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert asyncio.run(http_utils._is_near("node.example.org", {})) == near


def test_an_idle_connection_is_not_kept_longer_than_servers_do(monkeypatch) -> None:
    monkeypatch.setattr(http_utils, "KEEP_ALIVE_S", 0.05)
    server = Server(OK)

    async def story(url: str) -> None:
        await get(url)
        await get(url)
        assert server.connections == 1
        await asyncio.sleep(0.2)
        await get(url)
        assert server.connections == 2

    run(server, story)


# A proxy of the environment; its kin for the router is in tests/fast/router/test_router_forwarding.py.
def test_http_proxy_does_not_catch_loopback(monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)

    async def story(url: str) -> None:
        assert await post(url, {}) == {"a": 1}
        assert await get(url.replace("127.0.0.1", "localhost")) == {"a": 1}

    run(Server(OK), story)


def test_each_event_loop_has_its_own_session_and_closes_it() -> None:
    seen = []

    async def story(url: str) -> None:
        first = await http_utils._session_for(url)
        assert await http_utils._session_for(url) is first
        await aclose()
        assert first.closed
        assert await get(url) == {"a": 1}
        seen.append(await http_utils._session_for(url))

    run(Server(OK), story)
    run(Server(OK), story)
    assert seen[0] is not seen[1]
    assert all(session.closed for session in seen)


def test_sessions_of_ended_loops_are_forgotten() -> None:
    asyncio.run(http_utils._session_for("http://127.0.0.1:1"))  # no aclose

    async def story(url: str) -> None:
        await http_utils._session_for(url)
        assert list(http_utils._sessions) == [asyncio.get_running_loop()]

    run(Server(OK), story)
    assert not http_utils._sessions


# Case F07.
@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("2001:db8::1", 8080, "http://[2001:db8::1]:8080"),
        ("[2001:db8::1]", 8080, "http://[2001:db8::1]:8080"),
        ("10.0.0.1", 80, "http://10.0.0.1:80"),
        ("host", 80, "http://host:80"),
    ],
)
def test_url_of_brackets_ipv6(host, port, url) -> None:
    assert url_of(host, port) == url
    assert url_of(host, port, "tcp") == url.replace("http", "tcp")
    assert split_host_port(url) == (bracket_host(host).strip("[]"), port)


# Case F06.
@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://[fd00::19]:8000", ("fd00::19", 8000)),
        ("http://10.0.0.1:80", ("10.0.0.1", 80)),
        ("http://node-3:8000", ("node-3", 8000)),
        ("[fd00::19]:8000", ("fd00::19", 8000)),
        ("node-3:8000", ("node-3", 8000)),
        ("https://example.org/path", ("example.org", 443)),
    ],
)
def test_split_host_port(url, expected) -> None:
    assert split_host_port(url) == expected


@pytest.mark.parametrize("url", ["", "node-3", "http://:80", "http://host:port", "http://[::1:80", "fd00::19:8000"])
def test_what_is_no_address_is_refused(url) -> None:
    with pytest.raises(EngineError, match="is not an address"):
        split_host_port(url)


# Case F07: all addresses, `::`.
def test_bind_socket_takes_names_and_ipv6_and_names_what_is_wrong() -> None:
    with bind_socket("localhost", 0) as sock:
        host, port = sock.getsockname()[:2]
        assert host in ("127.0.0.1", "::1")
        with pytest.raises(EngineError, match=f"port {port} of {host} is in use; choose another port, or 0"):
            bind_socket(host, port)
    with bind_socket("::", 0) as sock:
        assert sock.family == socket.AF_INET6
        with socket.create_connection(("::1", sock.getsockname()[1])):
            pass
    with bind_socket("[::1]", 0) as sock:
        assert sock.getsockname()[0] == "::1"
    with pytest.raises(EngineError, match="bind to an address of this machine"):
        bind_socket("203.0.113.7", 0)
    with pytest.raises(EngineError, match="host 'no such host' does not resolve"):
        bind_socket("no such host", 0)


# Case F07: no address is put together by hand.
def test_hosts_and_ports_are_joined_by_one_helper_only() -> None:
    package = Path(http_utils.__file__).parents[1]
    by_hand = re.compile(r"\{[^{}]*(host|addr|_ip)[^{}]*\}:\{")
    found = {
        f"{path.relative_to(package)}:{number}"
        for path in package.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if by_hand.search(line)
    }
    here = {name for name in found if name.startswith("utils/http_utils.py:")}
    assert len(here) == 1
    assert found == here, "use url_of or bracket_host: an IPv6 address needs brackets"


# Case F10: ports that others hold, and two who look for free ones at the same time.
def test_free_ports_are_distinct_from_those_in_use_and_from_those_of_another_allocator() -> None:
    occupied = [bind_socket("127.0.0.1", 0) for _ in range(2)]
    with ThreadPoolExecutor(2) as allocators:
        first, second = allocators.map(lambda _: [bind_socket("127.0.0.1", 0) for _ in range(50)], range(2))
    ports = [sock.getsockname()[1] for sock in (*occupied, *first, *second)]
    assert len(set(ports)) == 102  # held until they are used, so nobody else can be given one
    with pytest.raises(EngineError, match=f"port {ports[0]} of 0.0.0.0 is in use"):
        bind_socket("0.0.0.0", ports[0])  # a server on one interface is in the way of one on all
    for sock in (*occupied, *first, *second):
        sock.close()


@pytest.mark.parametrize(
    "error", [HttpError(503, "text", "http://host:1/x", 2.0), TransportError("http://host:1/x", "reset", sent=True)]
)
def test_errors_cross_process_borders(error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
