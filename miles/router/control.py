"""Control routes of the router: workers, hold and release, state. They take the router's token."""

from __future__ import annotations

import hmac
from typing import Annotated, Any
from urllib.parse import urlsplit

import orjson
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from miles.errors import EngineError
from miles.router.workers import WorkerPool
from miles.utils.http_utils import split_host_port

CONTROL_PATHS = frozenset(
    {"/add_worker", "/remove_worker", "/list_workers", "/hold", "/release", "/router_health", "/wait_idle"}
)


def worker_url(text: Any) -> str:
    """A worker's URL in its one spelling. Raises HTTPException(400) for anything else than http(s)://host:port."""
    wanted = 'give the worker as ?url=http://HOST:PORT or as JSON {"url": "http://HOST:PORT"}'
    if not isinstance(text, str) or not text:
        raise HTTPException(400, f"no url; {wanted}")
    url = text.rstrip("/")
    try:
        split_host_port(url)
    except EngineError as error:
        raise HTTPException(400, f"{error}; {wanted}") from error
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
        raise HTTPException(400, f"{text!r} is not the URL of a worker; {wanted}")
    return url


async def _named_worker(request: Request) -> tuple[str, str]:
    fields: dict[str, Any] = dict(request.query_params)
    body = await request.body()
    if body:
        try:
            given = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise HTTPException(400, "the body is not a JSON object")
        fields |= given
    return worker_url(fields.get("url")), str(fields.get("id") or "")


def control_app(pool: WorkerPool, api_key: str) -> FastAPI:
    """The FastAPI application of the control routes."""

    def check_token(authorization: Annotated[str, Header()] = "") -> None:
        if api_key and not hmac.compare_digest(authorization.encode(), f"Bearer {api_key}".encode()):
            raise HTTPException(401, "the router's control routes need the header Authorization: Bearer TOKEN")

    app = FastAPI(openapi_url=None, dependencies=[Depends(check_token)])

    @app.exception_handler(StarletteHTTPException)
    async def _error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.post("/add_worker")
    async def _add_worker(request: Request) -> dict[str, Any]:
        url, worker_id = await _named_worker(request)
        return {"url": url, "added": pool.add(url, worker_id)}

    @app.post("/remove_worker")
    async def _remove_worker(request: Request) -> dict[str, Any]:
        # Removing what is not there is no error: an engine's owner removes it before it kills it, whatever came before.
        url, _ = await _named_worker(request)
        return {"url": url, "removed": pool.remove(url)}

    @app.get("/list_workers")
    async def _list_workers() -> dict[str, Any]:
        return pool.state()

    @app.post("/hold")
    async def _hold() -> dict[str, Any]:
        pool.hold()
        return {"held": True, "in_flight": pool.in_flight}

    @app.post("/release")
    async def _release() -> dict[str, Any]:
        pool.release()
        return {"held": False}

    @app.get("/router_health")
    async def _router_health() -> dict[str, Any]:
        workers = pool.workers
        return {"status": "ok", "workers": len(workers), "healthy": sum(worker.healthy for worker in workers)}

    @app.get("/wait_idle")
    async def _wait_idle(timeout_s: float = 60.0) -> JSONResponse:
        if await pool.idle(timeout_s):
            return JSONResponse({"in_flight": 0})
        busy = [entry for entry in pool.describe() if entry["in_flight"]]
        text = f"{pool.in_flight} requests are still in flight after {timeout_s:g} s; abort them at these workers"
        return JSONResponse({"error": text, "in_flight": pool.in_flight, "workers": busy}, 504)

    return app
