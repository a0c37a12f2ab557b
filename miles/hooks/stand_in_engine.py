"""A server in place of router and engines: answers `/generate` in their format with tokens of no meaning."""

from __future__ import annotations

import zlib
from types import TracebackType
from typing import Any

from aiohttp import web

TOKENS = 5


class StandInEngine:
    """`async with StandInEngine(tokenizer) as engine:` serves on `engine.port` and counts what it was asked.

    The answer to a request depends on its prompt and seed alone. Replies are whole or streamed, as asked.
    """

    def __init__(self, tokenizer: Any, version: str = "1") -> None:
        self._tokenizer, self._version = tokenizer, version
        self.requests: list[dict[str, Any]] = []
        self.port = 0

    async def __aenter__(self) -> StandInEngine:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.requests.append(asked)
        if not isinstance(asked.get("input_ids"), list) and not isinstance(asked.get("text"), str):
            return web.json_response({"error": "give input_ids, or text"}, status=400)
        reply = self._reply(asked)
        if not asked.get("stream"):
            return web.json_response(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + web.json_response(reply).body + b"\n\ndata: [DONE]\n\n")  # pyright: ignore
        return response

    def _reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        params = asked.get("sampling_params") or {}
        count = max(1, min(TOKENS, int(params.get("max_new_tokens") or TOKENS)))
        known = sorted(set(self._tokenizer.get_vocab().values()))
        start = zlib.crc32(repr((asked.get("input_ids"), asked.get("text"), params.get("sampling_seed"))).encode())
        token_ids = [known[(start + 7919 * i) % len(known)] for i in range(count)]
        ended = count < int(params.get("max_new_tokens") or count + 1)
        if ended and self._tokenizer.eos_token_id is not None:
            token_ids[-1] = int(self._tokenizer.eos_token_id)
        meta: dict[str, Any] = {
            "id": asked.get("rid") or "0",
            "finish_reason": {"type": "stop" if ended else "length"},
            "prompt_tokens": len(asked.get("input_ids") or []),
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": self._version,
        }
        if asked.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token_id, None] for token_id in token_ids]
        return {"text": self._tokenizer.decode(token_ids), "output_ids": token_ids, "meta_info": meta}
