import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from aiohttp import web

from miles.errors import EngineError
from miles.utils.http_utils import HttpError, TransportError, aclose, post_stream

Answer = Callable[[web.Request, int], Awaitable[web.StreamResponse]]
EVENTS = [{"n": 1, "text": "ä"}, {"n": 2, "text": "x" * 300_000}, {"n": 3}]


def sse(*events: Any, done: bool = True) -> bytes:
    body = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    return body + b"data: [DONE]\n\n" if done else body


async def begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


def stream_from(answer: Answer) -> tuple[list[Any], int]:
    """What `post_stream` hands on from a server that answers its i-th request by `answer(request, i)`; and how many came."""
    seen: list[Any] = []
    requests = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        assert await request.json() == {"a": 1}
        assert request.headers["X-Own"] == "b"
        requests += 1
        return await answer(request, requests)

    async def story() -> None:
        app = web.Application()
        app.router.add_post("/generate", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            await post_stream(f"http://{host}:{port}/generate", {"a": 1}, seen.append, headers={"X-Own": "b"})
        finally:
            await aclose()
            await runner.cleanup()

    try:
        asyncio.run(story())
    except EngineError as error:
        error.seen, error.requests = seen, requests  # type: ignore[attr-defined]
        raise
    return seen, requests


@pytest.mark.parametrize("size", [7, 4096, 1 << 20])
def test_events_come_whole_and_in_order_however_they_are_cut_into_packets(size: int) -> None:
    async def answer(request: web.Request, _: int) -> web.StreamResponse:
        response = await begin(request)
        events = EVENTS if size > 7 else [EVENTS[0], EVENTS[2]]
        body = b": a comment\n\n" + sse(*events)
        for start in range(0, len(body), size):
            await response.write(body[start : start + size])
            await asyncio.sleep(0)
        return response

    seen, requests = stream_from(answer)
    assert seen == (EVENTS if size > 7 else [EVENTS[0], EVENTS[2]])
    assert requests == 1


def test_a_refusal_has_the_servers_text_and_is_not_repeated() -> None:
    async def answer(request: web.Request, _: int) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such field"}}, status=400)

    with pytest.raises(HttpError, match=r"400.*no such field") as failure:
        stream_from(answer)
    assert failure.value.requests == 1  # type: ignore[attr-defined]


def test_a_request_that_is_put_off_is_repeated() -> None:
    async def answer(request: web.Request, number: int) -> web.StreamResponse:
        if number == 1:
            return web.Response(status=429)
        return web.Response(body=sse(EVENTS[0]))

    assert stream_from(answer) == ([EVENTS[0]], 2)


def test_an_error_in_the_stream_is_raised_with_its_text() -> None:
    async def answer(request: web.Request, _: int) -> web.StreamResponse:
        return web.Response(body=sse(EVENTS[0], {"error": {"message": "logits are not finite"}}))

    with pytest.raises(EngineError, match="ended its stream with an error: logits are not finite"):
        stream_from(answer)


def test_a_stream_that_breaks_off_is_an_error_and_not_begun_anew() -> None:
    async def answer(request: web.Request, _: int) -> web.StreamResponse:
        response = await begin(request)
        await response.write(sse(EVENTS[0], done=False))
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return response

    with pytest.raises(TransportError, match="the stream broke off") as failure:
        stream_from(answer)
    assert (failure.value.seen, failure.value.requests) == ([EVENTS[0]], 1)  # type: ignore[attr-defined]


def test_a_stream_without_its_last_event_is_an_error() -> None:
    async def answer(request: web.Request, _: int) -> web.StreamResponse:
        return web.Response(body=sse(EVENTS[0], done=False))

    with pytest.raises(TransportError, match="ended before its last event"):
        stream_from(answer)
