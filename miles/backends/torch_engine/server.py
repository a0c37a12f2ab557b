"""The engine's HTTP routes: names and fields of SGLang's native API."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from miles.backends.torch_engine.chat import read_chat
from miles.backends.torch_engine.control_routes import Control, Handler, field, on_engine
from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.model import LoadedModel
from miles.backends.torch_engine.request import (
    Progress,
    Request,
    RequestRefused,
    answer,
    check_known,
    read_request,
)
from miles.backends.torch_engine.weight_routes import add_weight_controls
from miles.errors import EngineError

Answer = Callable[..., dict[str, Any]]
"""Writes the answer of a finished request; of one that streams, given a `Progress`, also a chunk."""
Reader = Callable[[Any, LoadedModel, Callable[[list[Request]], None]], tuple[Request, Answer]]
_PROBE_TIMEOUT_S = 30.0


def create_app(engine: Engine, api_key: str | None = None) -> FastAPI:
    """The application that serves a started engine. Control routes require `api_key` as a bearer token, if given."""
    app = FastAPI(title="Miles torch engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.routes.append(Route("/generate", endpoint=GenerateRoute(engine, _read_generate), methods=["POST"]))
    chat = GenerateRoute(engine, read_chat)
    app.router.routes.append(Route("/v1/chat/completions", endpoint=chat, methods=["POST"]))
    app.add_exception_handler(Exception, _unexpected)
    _add_information(app, engine)
    _add_controls(app, engine, api_key)
    return app


class _Client:
    """What the engine has said about one request, until its client is told."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._progress: list[Progress] = []
        self.news: asyncio.Future[None] = loop.create_future()
        self.finished = False

    def tell(self, progress: Progress | None) -> None:
        """Note a chunk, or with None the end. A chunk replaces one of its version that the client has not had yet."""
        if progress is None:
            self.finished = True
        else:
            if self._progress and self._progress[-1].weight_version == progress.weight_version:
                self._progress.pop()
            self._progress.append(progress)
        if not self.news.done():
            self.news.set_result(None)

    def take(self) -> list[Progress]:
        """The chunks to send now."""
        taken, self._progress = self._progress, []
        if not self.finished:
            self.news = self._loop.create_future()
        return taken


class GenerateRoute:
    """A route that generates, as a bare ASGI application: it is called for every sample of every rollout."""

    def __init__(self, engine: Engine, read: Reader) -> None:
        self._engine, self._read = engine, read
        self._clients: dict[int, _Client] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that goes away aborts it."""
        try:
            request, write = self._read(_parse(await _read_body(receive)), self._engine.model, self._done)
        except RequestRefused as refusal:
            await _send(send, refusal.status, _error(refusal))
            return
        request.show = self._show
        self._loop = loop = asyncio.get_running_loop()
        client = self._clients[id(request)] = _Client(loop)
        gone = asyncio.ensure_future(receive())
        try:
            self._engine.submit(request)
            await self._answer(request, write, client, gone, send)
        except EngineError as error:
            await _send(send, 500, _error(error))
        finally:
            gone.cancel()
            del self._clients[id(request)]

    async def _answer(
        self, request: Request, write: Answer, client: _Client, gone: asyncio.Future[Any], send: Send
    ) -> None:
        """Send the answer when the request has finished, and before it the chunks of one that streams."""
        begun = False
        while True:
            await asyncio.wait((client.news, gone), return_when=asyncio.FIRST_COMPLETED)
            if not client.news.done() or (gone.done() and not client.finished):
                self._engine.call(lambda: self._engine.abort(request.rid, "the client went away"))
                return
            chunks = [_event(write(progress)) for progress in client.take() if not _is_superseded(progress, client)]
            if not client.finished:
                await _send_events(send, chunks, first=not begun, last=False)
                begun = True
                continue
            end = write() if request.error is None else {"error": {"message": request.error}}
            if request.stream and (begun or chunks or request.error is None):
                await _send_events(send, [*chunks, _event(end)], first=not begun, last=True)
            else:
                await _send(send, 200 if request.error is None else request.error_status, orjson.dumps(end))
            return

    def _done(self, finished: list[Request]) -> None:
        self._on_loop(lambda: self._tell([(request, None) for request in finished]))

    def _show(self, progress: Progress) -> None:
        self._on_loop(lambda: self._tell([(progress.request, progress)]))

    def _on_loop(self, action: Callable[[], None]) -> None:
        assert self._loop is not None  # set before the request was submitted
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _tell(self, news: list[tuple[Request, Progress | None]]) -> None:
        for request, progress in news:
            client = self._clients.get(id(request))
            if client is not None:
                client.tell(progress)


def _is_superseded(progress: Progress, client: _Client) -> bool:
    """Whether the answer, which is there, tells the same and more."""
    return client.finished and progress.weight_version == progress.request.weight_version


def _read_generate(body: Any, model: LoadedModel, done: Callable[[list[Request]], None]) -> tuple[Request, Answer]:
    request = read_request(body, model, done)
    return request, lambda progress=None: answer(request, model, progress)


def _add_information(app: FastAPI, engine: Engine) -> None:
    @app.get("/health")
    async def health() -> Response:
        reason = engine.unhealthy()
        return _json({"status": "ok"}) if reason is None else _json({"reason": reason}, 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        reason = engine.unhealthy()
        if reason is None:
            try:
                token = await asyncio.wait_for(asyncio.wrap_future(engine.call(engine.probe)), _PROBE_TIMEOUT_S)
                return _json({"status": "ok", "token": token})
            except (TimeoutError, EngineError, RequestRefused) as error:
                reason = str(error) or f"no token within {_PROBE_TIMEOUT_S:.0f} s"
        return _json({"reason": reason}, 503)

    @app.get("/model_info")
    async def model_info() -> Response:
        config = engine.model.hf.config
        return _json(
            {
                "model_path": engine.model.path,
                "weight_version": engine.weight_version,
                "is_generation": True,
                "model_type": config.model_type,
                "vocab_size": engine.model.vocab_size,
                "context_length": engine.model.context_length,
                "eos_token_ids": sorted(engine.model.eos_token_ids),
                "has_tokenizer": engine.model.tokenizer is not None,
                "num_parameters": len(engine.weights.names),
            }
        )

    @app.get("/server_info")
    async def server_info() -> Response:
        return _json(
            {
                **asdict(engine.settings),
                "engine": "torch",
                "version": _version("miles"),
                "torch_version": _version("torch"),
                "transformers_version": _version("transformers"),
                "pid": os.getpid(),
                "weight_version": engine.weight_version,
                "paused": engine.paused,
                "drops_kv_at_update": True,
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
                "counters": asdict(engine.counters),
            }
        )


def _add_controls(app: FastAPI, engine: Engine, api_key: str | None) -> None:
    def control(path: str, known: frozenset[str], handler: Handler, methods: tuple[str, ...] = ("POST",)) -> None:
        async def endpoint(http: HttpRequest) -> Response:
            if not _authorised(http, api_key):
                return _json_error(
                    "this route needs the header Authorization: Bearer TOKEN with the engine's token", 401
                )
            try:
                raw = await http.body()
                body = _parse(raw) if raw else {}
                if not isinstance(body, dict):
                    raise RequestRefused(f"the body of {path} is a JSON object")
                check_known(body, known)
                return _json({"success": True, **await handler(body)})
            except RequestRefused as refusal:
                return _json_error(str(refusal), refusal.status)
            except EngineError as error:
                return _json_error(str(error), 500)

        app.add_api_route(path, endpoint, methods=list(methods), response_model=None)

    _add_request_controls(control, engine)
    add_weight_controls(control, engine)


def _add_request_controls(control: Control, engine: Engine) -> None:
    async def abort_request(body: dict[str, Any]) -> dict[str, Any]:
        rid, everything = field(body, "rid", str, ""), field(body, "abort_all", bool, False)
        if bool(rid) == everything:
            raise RequestRefused('give either {"rid": ...} or {"abort_all": true}')
        target = None if everything else rid
        return {"num_aborted": await on_engine(engine, lambda: engine.abort(target, "aborted by /abort_request"))}

    async def flush_cache(_: dict[str, Any]) -> dict[str, Any]:
        await on_engine(engine, engine.flush)
        return {"message": "cache flushed"}

    async def pause_generation(body: dict[str, Any]) -> dict[str, Any]:
        mode = field(body, "mode", str, "abort")
        await on_engine(engine, lambda: engine.pause(mode))
        return {"message": f"generation paused ({mode})"}

    async def continue_generation(_: dict[str, Any]) -> dict[str, Any]:
        await on_engine(engine, engine.resume)
        return {"message": "generation continues"}

    control("/abort_request", frozenset({"rid", "abort_all"}), abort_request)
    control("/flush_cache", frozenset(), flush_cache, ("GET", "POST"))
    control("/pause_generation", frozenset({"mode"}), pause_generation)
    control("/continue_generation", frozenset(), continue_generation)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _authorised(http: HttpRequest, api_key: str | None) -> bool:
    given = http.headers.get("authorization", "")
    return api_key is None or hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode())


async def _read_body(receive: Receive) -> bytes:
    message = await receive()
    body = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return body


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error


def _error(message: object) -> bytes:
    return orjson.dumps({"error": {"message": str(message)}})


async def _send(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _send_events(send: Send, events: list[bytes], *, first: bool, last: bool) -> None:
    """Send server-sent events: `first` begins the answer, and `last` ends it with `[DONE]`."""
    if first:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    body = b"".join([*events, b"data: [DONE]\n\n"] if last else events)
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _unexpected(_: HttpRequest, error: Exception) -> Response:
    return _json_error(f"{type(error).__name__}: {error}", 500)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _json_error(message: str, status: int) -> Response:
    return Response(_error(message), status, media_type="application/json")
