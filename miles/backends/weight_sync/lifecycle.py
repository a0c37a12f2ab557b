"""The one life of a weight update, whatever its transport: hold, quiet the engines, send, prove, go on, release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from miles.backends.weight_sync.liveness import living, while_alive
from miles.backends.weight_sync.records import SentWeights
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.errors import MilesError, WeightSyncError
from miles.utils.http_utils import HttpError, get, post
from miles.utils.waits import OPEN, Waits

DRAIN_TIMEOUT_S = 600.0
CLEANUP_TIMEOUT_S = 60.0
"""Seconds the router may take for the last calls of an update."""
REPEATABLE = frozenset(
    {
        "abort_request",
        "add_worker",
        "continue_generation",
        "flush_cache",
        "hold",
        "pause_generation",
        "release",
        "remove_worker",
        "weights_checker",
    }
)
"""Control routes that do nothing more when they are called twice. An engine that stood still for some seconds closes
connections that were kept alive, so that the first call after it is lost."""
_ABORT_ROUNDS = 30
Send = Callable[[], Awaitable[SentWeights]]
Prove = Callable[[SentWeights], Awaitable[None]]
UpdateMode = Literal["drain", "in_place", "retract"]
"""What becomes of requests in flight: their clients resubmit them, they keep their KV, or their KV is computed anew."""


def auth(endpoint: EngineEndpoint | RouterEndpoint) -> dict[str, str]:
    """The header of control routes."""
    return {"Authorization": f"Bearer {endpoint.token}"}


async def control(endpoint: EngineEndpoint | RouterEndpoint, route: str, body: Any = None) -> Any:
    """POST a control route of an engine or the router; one of `REPEATABLE` again when its answer was lost."""
    with OPEN.on(endpoint.engine_id if isinstance(endpoint, EngineEndpoint) else "router", route):
        return await post(
            f"{endpoint.url}/{route}",
            {} if body is None else body,
            headers=auth(endpoint),
            idempotent=route in REPEATABLE,
        )


async def update(
    mode: UpdateMode,
    router: RouterEndpoint,
    engines: Sequence[EngineEndpoint],
    send: Send,
    prove: Prove,
    waits: Waits,
) -> SentWeights:
    """Update all engines, with dispatch held at the router until the new weights are proven.

    - `drain`: requests in flight are aborted, and their clients go on from the tokens so far; the engines flush.
    - `in_place`: the engines pause; requests go on where they stood, on KV of the old weights.
    - `retract`: the engines pause and drop the KV of requests, which go back to their queue and compute it anew.

    When anything fails, the engines leave the router and end what they still hold, so that none serves half an update,
    and the error rises. Raises WeightSyncError, with nothing begun, for `retract` on an engine that would resume
    requests on KV of the old weights.
    """
    if mode == "retract":
        await waits.on("engines", "say whether they drop old KV", _require_fresh_kv(engines))
    await waits.on("router", "hold dispatch", control(router, "hold"))
    try:
        if mode == "drain":
            await _drain(router, engines, waits)
        else:
            pause = _each(engines, "pause_generation", {"mode": mode})
            await waits.on("engines", f"pause generation ({mode})", pause)
        sent = await send()
        await waits.on("engines", f"prove weights {sent.version}", prove(sent))
        if mode != "drain":
            await waits.on("engines", "continue generation", _each(engines, "continue_generation"))
    except BaseException as error:
        await _leave(mode, router, engines, waits, error)
        raise
    await _release(router, waits)
    return sent


async def _drain(router: RouterEndpoint, engines: Sequence[EngineEndpoint], waits: Waits) -> None:
    await waits.on("engines", "abort what is in flight", _each(engines, "abort_request", {"abort_all": True}))
    idle = get(
        f"{router.url}/wait_idle?timeout_s={DRAIN_TIMEOUT_S:.0f}",
        headers=auth(router),
        timeout_s=DRAIN_TIMEOUT_S + 10,
    )
    await waits.on("router", "requests in flight to end", idle)
    await waits.on("engines", "flush their caches", _each(engines, "flush_cache"))


async def _leave(
    mode: UpdateMode,
    router: RouterEndpoint,
    engines: Sequence[EngineEndpoint],
    waits: Waits,
    error: BaseException,
) -> None:
    """Take the engines out of the router, end what paused ones hold, and release dispatch; notes go onto `error`."""

    def remove() -> Awaitable[Any]:
        return asyncio.gather(*(control(router, "remove_worker", {"url": e.url}) for e in engines))

    steps: list[tuple[str, str, Callable[[], Awaitable[Any]]]] = [("router", "remove the engines", remove)]
    if mode != "drain":
        steps.append(("engines", "end their requests", lambda: _end_requests(router, engines)))
    steps.append(("router", "release dispatch", lambda: control(router, "release")))
    for owner, name, step in steps:
        try:
            await waits.on(owner, name, step(), deadline_s=CLEANUP_TIMEOUT_S)
        except MilesError as second:
            error.add_note(f"and after this failure, the {owner} did not {name}: {second}")


async def _end_requests(router: RouterEndpoint, engines: Sequence[EngineEndpoint]) -> None:
    """End all requests with their tokens so far: paused engines would hold them for ever, or go on on half weights.

    Aborts are repeated, for a request that was under way to its engine when dispatch was held.
    """
    for left in reversed(range(_ABORT_ROUNDS)):
        await _each(await living(engines), "abort_request", {"abort_all": True})
        try:
            await get(f"{router.url}/wait_idle?timeout_s=1", headers=auth(router), deadline_s=2)
        except HttpError:
            if not left:
                raise
        else:
            return


async def _each(engines: Sequence[EngineEndpoint], route: str, body: Any = None) -> None:
    """POST a control route of every engine; EngineError as soon as one has died."""
    await while_alive(engines, asyncio.gather(*(control(e, route, body) for e in engines)))


async def _require_fresh_kv(engines: Sequence[EngineEndpoint]) -> None:
    """Raise WeightSyncError for an engine whose prompt cache outlives an update.

    A retracted request computes its KV anew only from where that cache ends, and the cache cannot be flushed while
    requests wait.
    """
    answers = await asyncio.gather(*(get(f"{e.url}/server_info") for e in engines))
    keeps = [
        e.engine_id
        for e, info in zip(engines, answers, strict=True)
        if not (info.get("drops_kv_at_update") or info.get("disable_radix_cache"))
    ]
    if keeps:
        raise WeightSyncError(
            f"mode retract: {', '.join(keeps)} would resume requests on cached KV of the old weights; turn the radix "
            "cache off, or use --pause-generation-mode drain"
        )


async def _release(router: RouterEndpoint, waits: Waits) -> None:
    try:
        await waits.on("router", "release dispatch", control(router, "release"), deadline_s=CLEANUP_TIMEOUT_S)
    except MilesError as e:
        raise WeightSyncError(f"the router did not release dispatch after a weight update: {e}") from e


async def checksums(engines: Sequence[EngineEndpoint]) -> dict[str, dict[str, str]]:
    """Each engine's checksums by parameter name; by rank and the engine's own names where `EngineEndpoint.kind` is `sglang`."""
    answers = await asyncio.gather(*(control(e, "weights_checker", {"action": "checksum"}) for e in engines))
    return {e.engine_id: _checksums_of(a) for e, a in zip(engines, answers, strict=True)}


def _checksums_of(answer: Mapping[str, Any]) -> dict[str, str]:
    if "checksums" in answer:
        return answer["checksums"]
    return {
        f"{name} of tensor-parallel rank {rank['parallelism_info']['tp_rank']}": value
        for rank in answer["ranks"]
        for name, value in rank["checksums"].items()
    }


async def versions(engines: Sequence[EngineEndpoint]) -> dict[str, str]:
    """Each engine's weight version."""
    answers = await asyncio.gather(*(get(f"{e.url}/model_info") for e in engines))
    return {e.engine_id: str(a["weight_version"]) for e, a in zip(engines, answers, strict=True)}
