"""A real HTTP server that speaks the `/generate` wire format and answers as a test says."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any]], Any]
"""Takes the request's JSON; returns the reply's JSON, a `web.Response`, or something to await for one."""


def reply(
    token_ids: Sequence[int],
    *,
    text: str = "",
    finish: str = "stop",
    version: str = "1",
    log_probs: Sequence[float | None] | None = None,
    **meta: Any,
) -> dict[str, Any]:
    """A `/generate` reply; `meta` adds to or replaces entries of `meta_info`."""
    log_probs = [-0.5] * len(token_ids) if log_probs is None else log_probs
    info = {
        "finish_reason": {"type": finish},
        "prompt_tokens": 1,
        "completion_tokens": len(token_ids),
        "cached_tokens": 0,
        "output_token_logprobs": [[lp, t, None] for lp, t in zip(log_probs, token_ids, strict=True)],
        "weight_version": version,
    }
    return {"text": text, "meta_info": {**info, **meta}}


class ScriptedEngine:
    """`async with ScriptedEngine(script) as engine:` serves on `engine.url` and keeps what it was asked."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        """`rid` of the requests whose client went away."""
        self.running = 0
        self.most_running = 0
        self.url = ""

    async def __aenter__(self) -> ScriptedEngine:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.requests.append(payload)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            answer = self._script(payload)
            if inspect.isawaitable(answer):
                answer = await answer
        except asyncio.CancelledError:
            self.cancelled.append(payload["rid"])
            raise
        finally:
            self.running -= 1
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def sample_indices(self) -> list[int]:
        """Sample numbers of the requests so far, as their `rid` names them."""
        return [int(r["rid"].split("-")[1]) for r in self.requests]
