"""The one life of a weight update, whatever its transport: hold, drain, flush, send, prove, release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles.backends.weight_sync.records import SentWeights
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.errors import MilesError, WeightSyncError
from miles.utils.http_utils import get, post
from miles.utils.waits import Waits

DRAIN_TIMEOUT_S = 600.0
CLEANUP_TIMEOUT_S = 60.0
"""Seconds the router may take for the last calls of an update."""
Send = Callable[[], Awaitable[SentWeights]]
Prove = Callable[[SentWeights], Awaitable[None]]


def auth(endpoint: EngineEndpoint | RouterEndpoint) -> dict[str, str]:
    """The header of control routes."""
    return {"Authorization": f"Bearer {endpoint.token}"}


async def control(endpoint: EngineEndpoint | RouterEndpoint, route: str, body: Any = None) -> Any:
    """POST a control route of an engine or the router."""
    return await post(f"{endpoint.url}/{route}", {} if body is None else body, headers=auth(endpoint))


async def drained_update(
    router: RouterEndpoint, engines: Sequence[EngineEndpoint], send: Send, prove: Prove, waits: Waits
) -> SentWeights:
    """Update all engines in `drain` mode.

    Dispatch is held at the router, requests in flight are aborted (their clients go on from the tokens so far), the
    engines flush, take the buckets, and are proven before dispatch goes on. When anything fails, the engines leave the
    router, so that none serves half an update, and the error rises.
    """
    await waits.on("router", "hold dispatch", control(router, "hold"))
    try:
        aborts = [control(e, "abort_request", {"abort_all": True}) for e in engines]
        await waits.on("engines", "abort what is in flight", asyncio.gather(*aborts))
        idle = get(
            f"{router.url}/wait_idle?timeout_s={DRAIN_TIMEOUT_S:.0f}",
            headers=auth(router),
            timeout_s=DRAIN_TIMEOUT_S + 10,
        )
        await waits.on("router", "requests in flight to end", idle)
        flushes = [control(e, "flush_cache") for e in engines]
        await waits.on("engines", "flush their caches", asyncio.gather(*flushes))
        sent = await send()
        await waits.on("engines", f"prove weights {sent.version}", prove(sent))
    except BaseException as error:
        leaving = [control(router, "remove_worker", {"url": e.url}) for e in engines]
        try:
            await waits.on("router", "remove the engines", asyncio.gather(*leaving), deadline_s=CLEANUP_TIMEOUT_S)
            await _release(router, waits)
        except MilesError as second:
            error.add_note(f"and the engines could not be taken out of the router: {second}")
        raise
    await _release(router, waits)
    return sent


async def _release(router: RouterEndpoint, waits: Waits) -> None:
    try:
        await waits.on("router", "release dispatch", control(router, "release"), deadline_s=CLEANUP_TIMEOUT_S)
    except MilesError as e:
        raise WeightSyncError(f"the router did not release dispatch after a weight update: {e}") from e


async def checksums(engines: Sequence[EngineEndpoint]) -> dict[str, dict[str, str]]:
    """Each engine's checksums by parameter name."""
    answers = await asyncio.gather(*(control(e, "weights_checker", {"action": "checksum"}) for e in engines))
    return {e.engine_id: a["checksums"] for e, a in zip(engines, answers, strict=True)}


async def versions(engines: Sequence[EngineEndpoint]) -> dict[str, str]:
    """Each engine's weight version."""
    answers = await asyncio.gather(*(get(f"{e.url}/model_info") for e in engines))
    return {e.engine_id: str(a["weight_version"]) for e, a in zip(engines, answers, strict=True)}
