"""Faults that others met in public, with the same small inputs."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from router_servers import RouterProcess, Seen, Worker, answer_ok, reply, until

from miles.utils import http_utils


@pytest.fixture
def quick_router(tmp_path: Path) -> Iterator[RouterProcess]:
    """One round of health checks in half a second, and a worker is out after one failure."""
    checks = ("--health-check-timeout", "0.5", "--health-check-interval", "0.1", "--failure-threshold", "1")
    router = RouterProcess(tmp_path / "router.log", *checks)
    yield router
    router.pool.shutdown(cancel_futures=True)
    router.process.stop()


# Case F03: health checks one after another.
def test_a_round_over_eight_hanging_workers_takes_as_long_as_one(quick_router, make_worker) -> None:
    hanging = make_worker("hanging", health=None, host="0.0.0.0")
    started = time.monotonic()
    quick_router.add(*(f"http://127.0.0.{i}:{hanging.port}" for i in range(2, 10)))
    until(lambda: not any(entry["healthy"] for entry in quick_router.workers().values()))
    assert len(quick_router.workers()) == 8
    assert time.monotonic() - started < 3  # one after another: 4 s for a round that begins after they were added


# Case F03: a dead worker beside one that lives, and an error that is an answer.
def test_a_dead_worker_is_passed_over_and_an_error_of_a_living_one_is_not_sent_again(
    patient_router, make_worker, closed_port
) -> None:
    async def broken(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.target == "/generate":
            writer.write(reply(b"scheduler died", "500 Oops"))
        else:
            await answer_ok(worker, seen, writer)

    alive = make_worker("alive", broken)
    patient_router.add(f"http://127.0.0.1:{closed_port}", alive.url)
    assert [patient_router.call("GET", "/model_info").json["worker"] for _ in range(4)] == ["alive"] * 4
    alive.seen.clear()
    answer = patient_router.call("POST", "/generate", b"{}")
    assert (answer.status, answer.body) == (500, b"scheduler died")
    assert len(alive.seen) == 1


# Case F01: a read time-out is no reason to generate twice, neither for the client nor for the router.
def test_a_client_that_times_out_has_its_request_sent_once(router, make_worker) -> None:
    async def silent(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    workers = [make_worker(name, silent) for name in "ab"]
    router.add(*(worker.url for worker in workers))

    async def story() -> None:
        with pytest.raises(http_utils.TransportError) as caught:
            await http_utils.post(f"http://127.0.0.1:{router.port}/generate", {}, timeout_s=0.3)
        assert caught.value.sent
        await http_utils.aclose()

    asyncio.run(story())
    until(lambda: sum(worker.left for worker in workers) == 1)  # the worker is told that nobody waits any more
    assert sum(len(worker.seen) for worker in workers) == 1


# Case F04: a length that belongs to another spelling of the body.
@pytest.mark.parametrize("form", ["content-length", "chunked"])
def test_a_large_compressed_answer_arrives_whole_at_the_client(router, make_worker, form) -> None:
    content = {"output_ids": list(range(150_000)), "text": "\u00e9 " * 1000}
    text = orjson.dumps(content, option=orjson.OPT_INDENT_2)
    packed = gzip.compress(text)
    assert len(text) > 1_000_000

    async def compressed(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        assert "gzip" in seen.header("accept-encoding")[0]
        if form == "content-length":
            writer.write(reply(packed, content_encoding="gzip", connection="keep-alive", keep_alive="timeout=5"))
        else:
            head = "content-type: application/json\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked"
            writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
            for at in range(0, len(packed), 50_000):
                piece = packed[at : at + 50_000]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    router.add(make_worker("w", compressed).url)

    async def story() -> None:
        for _ in range(2):  # the connection is as good as new
            assert await http_utils.post(f"http://127.0.0.1:{router.port}/generate", {"a": 1}) == content
        await http_utils.aclose()

    asyncio.run(story())
    answer = router.call("POST", "/generate", b"{}", {"Accept-Encoding": "gzip"})
    assert gzip.decompress(answer.body) == text
    for name in ("keep-alive", "connection"):
        assert not answer.header(name)
    lengths = answer.header("content-length")
    assert lengths == ([str(len(packed))] if form == "content-length" else [])
