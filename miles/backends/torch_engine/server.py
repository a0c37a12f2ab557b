"""The engine's HTTP routes: names and fields of SGLang's native API."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from miles.backends.torch_engine.chat import read_chat
from miles.backends.torch_engine.engine import MEMORY_TAGS, Engine
from miles.backends.torch_engine.model import LoadedModel
from miles.backends.torch_engine.request import Request, RequestRefused, answer, check_known, read_request
from miles.errors import EngineError

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Answer = Callable[[], dict[str, Any]]
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


class GenerateRoute:
    """A route that generates, as a bare ASGI application: it is called for every sample of every rollout."""

    def __init__(self, engine: Engine, read: Reader) -> None:
        self._engine, self._read = engine, read
        self._answers: dict[int, asyncio.Future[Request]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that goes away aborts it."""
        try:
            request, write = self._read(_parse(await _read_body(receive)), self._engine.model, self._done)
        except RequestRefused as refusal:
            await _send(send, refusal.status, _error(refusal))
            return
        self._loop = loop = asyncio.get_running_loop()
        answered = self._answers[id(request)] = loop.create_future()
        gone = asyncio.ensure_future(receive())
        try:
            self._engine.submit(request)
            await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                self._engine.call(lambda: self._engine.abort(request.rid, "the client went away"))
                return
        except EngineError as error:
            await _send(send, 500, _error(error))
            return
        finally:
            gone.cancel()
            del self._answers[id(request)]
        if request.error is not None:
            await _send(send, request.error_status, _error(request.error))
        else:
            await _send(send, 200, orjson.dumps(write()))

    def _done(self, finished: list[Request]) -> None:
        assert self._loop is not None  # set before the request was submitted
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resolve, finished)

    def _resolve(self, finished: list[Request]) -> None:
        for request in finished:
            answered = self._answers.get(id(request))
            if answered is not None and not answered.done():
                answered.set_result(request)


def _read_generate(body: Any, model: LoadedModel, done: Callable[[list[Request]], None]) -> tuple[Request, Answer]:
    request = read_request(body, model, done)
    return request, lambda: answer(request, model)


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
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
                "counters": asdict(engine.counters),
            }
        )


class _Control(Protocol):
    """Adds one control route: its path, the body fields it knows, and what it does."""

    def __call__(
        self, path: str, known: frozenset[str], handler: Handler, methods: tuple[str, ...] = ("POST",)
    ) -> None: ...


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
    _add_weight_controls(control, engine)


async def _on(engine: Engine, action: Callable[[], Any]) -> Any:
    """Run `action` on the engine's thread between two steps."""
    return await asyncio.wrap_future(engine.call(action))


def _add_request_controls(control: _Control, engine: Engine) -> None:
    async def abort_request(body: dict[str, Any]) -> dict[str, Any]:
        rid, everything = _field(body, "rid", str, ""), _field(body, "abort_all", bool, False)
        if bool(rid) == everything:
            raise RequestRefused('give either {"rid": ...} or {"abort_all": true}')
        target = None if everything else rid
        return {"num_aborted": await _on(engine, lambda: engine.abort(target, "aborted by /abort_request"))}

    async def flush_cache(_: dict[str, Any]) -> dict[str, Any]:
        await _on(engine, engine.flush)
        return {"message": "cache flushed"}

    async def pause_generation(body: dict[str, Any]) -> dict[str, Any]:
        mode = _field(body, "mode", str, "abort")
        await _on(engine, lambda: engine.pause(mode))
        return {"message": f"generation paused ({mode})"}

    async def continue_generation(_: dict[str, Any]) -> dict[str, Any]:
        await _on(engine, engine.resume)
        return {"message": "generation continues"}

    control("/abort_request", frozenset({"rid", "abort_all"}), abort_request)
    control("/flush_cache", frozenset(), flush_cache, ("GET", "POST"))
    control("/pause_generation", frozenset({"mode"}), pause_generation)
    control("/continue_generation", frozenset(), continue_generation)


def _add_weight_controls(control: _Control, engine: Engine) -> None:
    async def update_weights_from_tensor(body: dict[str, Any]) -> dict[str, Any]:
        payloads = body.get("serialized_named_tensors")
        if not (isinstance(payloads, list) and len(payloads) == 1 and isinstance(payloads[0], str)):
            raise RequestRefused("serialized_named_tensors is a list of one string: this engine has one rank")
        if body.get("load_format") != "flattened_bucket":
            raise RequestRefused(
                f'load_format is {body.get("load_format")!r}; the torch engine reads "flattened_bucket"'
            )
        new_version = _field(body, "weight_version", str, None)
        flush, abort = _field(body, "flush_cache", bool, True), _field(body, "abort_all_requests", bool, False)
        count = await _on(engine, lambda: engine.update_weights(payloads[0], flush, new_version, abort))
        return {"message": f"{count} tensors replaced", "weight_version": engine.weight_version}

    async def update_weight_version(body: dict[str, Any]) -> dict[str, Any]:
        new_version = _field(body, "new_version", str, None)
        if new_version is None:
            raise RequestRefused("new_version is missing")
        abort = _field(body, "abort_all_requests", bool, False)
        await _on(engine, lambda: engine.set_version(new_version, abort))
        return {"new_version": new_version}

    async def release_memory_occupation(body: dict[str, Any]) -> dict[str, Any]:
        tags = _tags(body)
        await _on(engine, lambda: engine.release_memory(tags))
        return {"message": f"released {', '.join(tags)}"}

    async def resume_memory_occupation(body: dict[str, Any]) -> dict[str, Any]:
        tags = _tags(body)
        await _on(engine, lambda: engine.resume_memory(tags))
        return {"message": f"resumed {', '.join(tags)}"}

    async def weights_checker(body: dict[str, Any]) -> dict[str, Any]:
        action = body.get("action")
        if action == "checksum":
            return {"checksums": await _on(engine, engine.weights.checksums)}
        if action == "snapshot":
            return {"num_parameters": await _on(engine, engine.weights.take_snapshot)}
        if action == "reset_tensors":
            await _on(engine, engine.reset_weights)
            return {"message": "all weights are garbage until they are sent again"}
        if action == "compare":
            differing = await _on(engine, engine.weights.differing_from_snapshot)
            if differing:
                raise RequestRefused(f"{len(differing)} parameters differ from the snapshot: {', '.join(differing)}")
            return {"message": "all parameters equal the snapshot"}
        raise RequestRefused(f"action is {action!r}; use checksum, snapshot, reset_tensors or compare")

    update_fields = {"serialized_named_tensors", "load_format", "flush_cache", "weight_version", "abort_all_requests"}
    control("/update_weights_from_tensor", frozenset(update_fields), update_weights_from_tensor)
    control("/update_weight_version", frozenset({"new_version", "abort_all_requests"}), update_weight_version)
    control("/release_memory_occupation", frozenset({"tags"}), release_memory_occupation)
    control("/resume_memory_occupation", frozenset({"tags"}), resume_memory_occupation)
    control("/weights_checker", frozenset({"action"}), weights_checker)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _authorised(http: HttpRequest, api_key: str | None) -> bool:
    given = http.headers.get("authorization", "")
    return api_key is None or hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode())


def _field(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestRefused(f"{name} is {value!r}; it must be of type {kind.__name__}")
    return value


def _tags(body: dict[str, Any]) -> list[str]:
    """The tags of a memory route; none, or an empty list, means all."""
    tags = _field(body, "tags", list, None) or list(MEMORY_TAGS)
    if not all(isinstance(tag, str) for tag in tags):
        raise RequestRefused(f"tags is {tags!r}; it must be a list of strings")
    return tags


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


async def _unexpected(_: HttpRequest, error: Exception) -> Response:
    return _json_error(f"{type(error).__name__}: {error}", 500)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _json_error(message: str, status: int) -> Response:
    return Response(_error(message), status, media_type="application/json")
