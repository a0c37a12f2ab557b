"""A router process, and workers that are raw sockets so that tests see and send exact bytes."""

from __future__ import annotations

import asyncio
import http.client
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from miles.utils.http_utils import bind_socket, url_of
from miles.utils.process import ServerProcess


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


def reply(body: bytes = b"{}", status: str = "200 OK", **headers: str) -> bytes:
    lines = {"content-type": "application/json", "content-length": str(len(body))}
    lines |= {key.replace("_", "-"): value for key, value in headers.items()}
    head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


Behaviour = Callable[["Worker", Seen, asyncio.StreamWriter], Awaitable[None]]


async def answer_ok(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(orjson.dumps({"worker": worker.name})))


@dataclass
class Worker:
    """An HTTP/1.1 server in a thread. `behaviour` answers everything but /health; None as `health` leaves it silent."""

    name: str = "w"
    behaviour: Behaviour = answer_ok
    health: str | None = "200 OK"
    host: str = "127.0.0.1"
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.start()

    def start(self) -> None:
        sock = bind_socket(self.host, self.port)
        self.port = sock.getsockname()[1]
        started = threading.Event()

        async def serve() -> None:
            self.server = await asyncio.start_server(self._connection, sock=sock)
            started.set()
            await self._stopped.wait()
            self.server.close()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:  # also connections that only now begin
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)

        self.loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(serve()), daemon=True)
        self.thread.start()
        assert started.wait(5)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopped.set)
            self.thread.join(5)
            self.loop.close()

    def open_gate(self) -> None:
        self.loop.call_soon_threadsafe(self.gate.set)

    @property
    def url(self) -> str:
        return url_of(self.host, self.port)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await _head(reader):
                first, *lines = head.decode("latin-1").split("\r\n")
                method, target, _ = first.split(" ")
                headers = [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines)]
                length = next((int(value) for key, value in headers if key.lower() == "content-length"), 0)
                seen = Seen(method, target, headers, await reader.readexactly(length))
                if target == "/health":
                    if self.health is None:
                        await asyncio.sleep(60)
                    writer.write(reply(status=str(self.health)))
                    continue
                self.seen.append(seen)
                self.in_flight += 1
                self.most_in_flight = max(self.in_flight, self.most_in_flight)
                answering = asyncio.ensure_future(self.behaviour(self, seen, writer))
                while not answering.done() and not (reader.at_eof() or reader.exception()):
                    await asyncio.wait({answering}, timeout=0.01)
                self.in_flight -= 1
                if not answering.done():
                    self.left += 1
                    answering.cancel()
                    return
                answering.result()
                if writer.is_closing():
                    return
        except asyncio.CancelledError:
            return  # the server stops
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n\r\n"))[:-4]
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def answer_when_open(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
    await worker.gate.wait()
    await answer_ok(worker, seen, writer)


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


class RouterProcess:
    """A router with the token `secret`, quick health checks, and proxy variables that lead nowhere."""

    def __init__(self, log_path: Path, *flags: str) -> None:
        nowhere = "http://127.0.0.1:9"
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"), nowhere)
        command = [sys.executable, "-m", "miles.router", "--api-key", "secret", "--exit-on-stdin-close"]
        command += ["--health-check-interval", "0.2", "--health-check-timeout", "1", "--failure-threshold", "2"]
        command += ["--worker-wait", "0.6", *flags]
        self.process = ServerProcess("router", command, log_path, env=proxies | {"no_proxy": ""})
        self.host = command[command.index("--host") + 1] if "--host" in command else "127.0.0.1"
        self.port: int = self.process.wait_ready(60)["port"]
        self.pool = ThreadPoolExecutor(32)

    def call(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(method, target, body, headers or {}, encode_chunked=not isinstance(body, bytes | None))
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    def control(self, method: str, target: str, body: Any = None) -> Answer:
        return self.call(method, target, body and orjson.dumps(body), {"Authorization": "Bearer secret"})

    def start(self, method: str = "POST", target: str = "/generate", body: bytes = b"{}"):
        return self.pool.submit(self.call, method, target, body)

    def add(self, *urls: str) -> None:
        for url in urls:
            assert self.control("POST", f"/add_worker?url={url}").status == 200

    def workers(self) -> dict[str, dict[str, Any]]:
        return {entry["url"]: entry for entry in self.control("GET", "/list_workers").json["workers"]}

    def reset(self) -> None:
        self.control("POST", "/release")
        for url in self.control("GET", "/list_workers").json["urls"]:
            self.control("POST", f"/remove_worker?url={url}")


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing of the kind happened"
        time.sleep(0.01)
    return found
