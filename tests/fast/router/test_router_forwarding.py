from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
import time

import orjson
import psutil
import pytest
from router_servers import RouterProcess, Seen, Worker, answer_when_open, reply, until


def test_a_request_arrives_byte_for_byte_and_without_added_headers(router, make_worker) -> None:
    worker = make_worker()
    router.add(worker.url)
    body = bytes(range(256)) * 40
    target = "/v1/a%2Fb//c;x=1?q=%20a+b&empty=&q=2"
    router.call(
        "PUT", target, body, {"X-Name": "Caf\u00e9".encode().decode("latin-1"), "X-Hop": "1", "Connection": "x-hop"}
    )
    (seen,) = worker.seen
    assert (seen.method, seen.target, seen.body) == ("PUT", target, body)
    assert seen.header("host") == [f"127.0.0.1:{worker.port}"]
    assert seen.header("content-length") == [str(len(body))]
    assert seen.header("x-name") == ["Caf\u00e9".encode().decode("latin-1")]
    assert {key.lower() for key, _ in seen.headers} == {"host", "content-length", "x-name", "accept-encoding"}
    assert seen.header("accept-encoding") == ["identity"]  # http.client's own


# Case F04.
def test_a_compressed_answer_passes_unchanged(router, make_worker) -> None:
    text = orjson.dumps({"tokens": list(range(150_000))}, option=orjson.OPT_INDENT_2)
    packed = gzip.compress(text)
    assert len(text) > 1_000_000

    async def answer(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(packed, content_encoding="gzip", connection="x-private", x_private="1", x_public="2"))

    router.add(make_worker("w", answer).url)
    answer_ = router.call("POST", "/generate", b"{}")
    assert answer_.body == packed
    assert answer_.header("content-encoding") == ["gzip"]
    assert answer_.header("content-length") == [str(len(packed))]
    assert answer_.header("x-public") == ["2"]
    assert not answer_.header("x-private")


def test_status_text_and_repeated_headers_of_a_worker_pass(router, make_worker) -> None:
    async def answer(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Slow Down\r\nset-cookie: a=1\r\nset-cookie: b=2\r\ncontent-length: 4\r\n\r\nbusy")

    router.add(make_worker("w", answer).url)
    answer_ = router.call("POST", "/generate", b"{}")
    assert (answer_.status, answer_.body) == (429, b"busy")
    assert answer_.header("set-cookie") == ["a=1", "b=2"]


def test_answers_without_a_body_keep_their_form(router, make_worker) -> None:
    async def answer(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.method == "HEAD":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 77\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    router.add(make_worker("w", answer).url)
    head = router.call("HEAD", "/file")
    assert (head.status, head.header("content-length"), head.body) == (200, ["77"], b"")
    empty = router.call("POST", "/flush")
    assert (empty.status, empty.header("content-length"), empty.body) == (204, [], b"")


def test_a_chunked_request_gets_a_length_that_fits(router, make_worker) -> None:
    worker = make_worker()
    router.add(worker.url)
    assert router.call("POST", "/generate", iter([b"one ", b"two"])).status == 200
    assert worker.seen[0].body == b"one two"
    assert worker.seen[0].header("content-length") == ["7"]
    assert not worker.seen[0].header("transfer-encoding")


def test_a_stream_passes_piece_by_piece(router, make_worker) -> None:
    async def answer(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"7\r\ndata: 1\r\n")
        await worker.gate.wait()
        writer.write(b"7\r\ndata: 2\r\n0\r\n\r\n")

    worker = make_worker("w", answer)
    router.add(worker.url)
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)
    connection.request("POST", "/generate", b"{}")
    response = connection.getresponse()
    assert response.read1() == b"data: 1"  # the worker has not written the second piece yet
    worker.open_gate()
    assert response.read() == b"data: 2"
    connection.close()


def test_a_large_answer_passes_whole(router, make_worker) -> None:
    body = bytes(range(256)) * (24 << 10)

    async def answer(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(body))
        await writer.drain()

    router.add(make_worker("w", answer).url)
    answer_ = router.call("GET", "/file")
    assert answer_.header("content-length") == [str(len(body))]
    assert answer_.body == body


async def _too_short(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(b"{}", content_length="1000"))
    writer.close()


def test_an_answer_shorter_than_its_content_length_is_a_502(router, make_worker) -> None:
    router.add(make_worker("w", _too_short).url)
    answer = router.call("POST", "/generate", b"{}")
    assert answer.status == 502
    assert "ClientPayloadError" in answer.json["reason"]


def test_a_stream_that_breaks_off_reads_as_broken(router, make_worker) -> None:
    async def answer(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        writer.close()

    router.add(make_worker("w", answer).url)
    with pytest.raises(http.client.IncompleteRead):
        router.call("POST", "/generate", b"{}")


def test_a_client_that_leaves_cancels_its_request_at_the_worker(router, make_worker) -> None:
    worker = make_worker("w", answer_when_open)
    router.add(worker.url)
    with socket.create_connection(("127.0.0.1", router.port)) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        until(lambda: worker.in_flight == 1)
    until(lambda: worker.left == 1)
    until(lambda: router.workers()[worker.url]["in_flight"] == 0)
    worker.open_gate()
    assert router.call("POST", "/generate", b"{}").status == 200


def test_a_client_that_leaves_while_it_waits_is_never_dispatched(router, make_worker) -> None:
    worker = make_worker()
    router.add(worker.url)
    router.control("POST", "/hold")
    with socket.create_connection(("127.0.0.1", router.port)) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        until(lambda: router.control("GET", "/list_workers").json["waiting"] == 1)
    until(lambda: router.control("GET", "/list_workers").json["waiting"] == 0)
    router.control("POST", "/release")
    time.sleep(0.05)
    assert not worker.seen


def test_proxy_variables_of_the_environment_catch_nothing(router: RouterProcess, make_worker) -> None:
    environment = psutil.Process(router.process.pid).environ()
    assert environment["http_proxy"] == "http://127.0.0.1:9"
    worker = make_worker()
    router.add(worker.url)
    assert router.call("POST", "/generate", b"{}").json == {"worker": "w"}
    time.sleep(0.5)  # health checks took the direct way too
    assert router.workers()[worker.url]["consecutive_failures"] == 0


def test_a_worker_at_an_ipv6_address_is_reached(router, make_worker) -> None:
    worker = make_worker("six", host="::1")
    router.add(worker.url)
    assert worker.url.startswith("http://[::1]:")
    assert router.call("POST", "/generate", b"{}").json == {"worker": "six"}
    assert worker.seen[0].header("host") == [f"[::1]:{worker.port}"]


def test_what_is_not_a_path_is_refused(router, make_worker) -> None:
    router.add(make_worker().url)
    with socket.create_connection(("127.0.0.1", router.port)) as client:
        client.sendall(b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400")
