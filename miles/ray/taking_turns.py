"""`TakingTurns`: trainer and engines on the same memory, of which whoever does not work gives up its part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from miles.backends.weight_sync.lifecycle import control
from miles.backends.weight_sync.liveness import is_alive, while_alive
from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.utils.waits import Waits

TAGS = {"kv_cache": "kv_cache", "weight": "weights"}
"""What `--offload-rollout-level` calls the parts of an engine's memory, and what engines call them."""


class Restarts(Protocol):
    """The restarts of engines that died: one that starts takes all its memory, also what is the trainer's just now."""

    async def hold(self) -> Sequence[EngineEndpoint]:
        """Start none from now on, after those that are starting; returns the engines that serve."""
        ...

    async def allow(self) -> None:
        """Start those that wait, and others from now on."""
        ...


class TakingTurns:
    """Placement of a run whose trainer and engines share GPUs.

    ```
    rollout   engines: weights, KV     trainer: away
    training  engines: away            trainer: there
    publish   engines: weights         trainer: there      KV comes back when the trainer has gone: the two do not fit
    ```
    It begins as a rollout: the trainer has left when it was ready. `engines` gives those that live; one that has just
    started has all its memory. `tags` is what engines give up (of `TAGS`), nothing when it is empty. An engine that dies
    while the trainer has the memory is started again after it, by `restarts`; one that dies gives up nothing, and is no
    error here.
    """

    def __init__(
        self,
        trainer: Any,
        engines: Callable[[], Sequence[EngineEndpoint]],
        waits: Waits,
        *,
        offload_train: bool,
        tags: Sequence[str],
        restarts: Restarts | None = None,
    ) -> None:
        self._trainer, self._engines, self._waits = trainer, engines, waits
        self._offload_train, self._tags = offload_train, tuple(tags)
        self._restarts = restarts
        self._trainer_is_away = offload_train
        self._asleep: dict[tuple[str, int], set[str]] = {}
        """What each process has given up: another at the same address has not."""
        self._moving = asyncio.Lock()
        """Held while memory changes hands, and by a weight update: an engine may be brought up beside the loop."""

    @asynccontextmanager
    async def for_rollout(self) -> AsyncIterator[None]:
        """The engines have all their memory."""
        async with self._moving:
            await self._give_to_engines()
        yield

    @asynccontextmanager
    async def for_training(self) -> AsyncIterator[None]:
        """The trainer has all of its memory; it keeps it for the publish that follows."""
        serving = await self._restarts.hold() if self._restarts is not None else self._engines()
        async with self._moving:
            await self._give_up(set(self._tags), serving)
            await self._trainer_back()
        yield

    @asynccontextmanager
    async def for_weight_sync(self) -> AsyncIterator[None]:
        """The trainer's weights and room for the engines' are there; afterwards the engines have all their memory."""
        async with self._moving:
            await self._trainer_in_place_of_kv()
            await self._wake({"weights"})
            yield
            await self._give_to_engines()

    @asynccontextmanager
    async def for_scoring(self) -> AsyncIterator[None]:
        """The trainer's weights are there, in the place of the engines' KV; afterwards the engines have all their memory."""
        async with self._moving:
            await self._trainer_in_place_of_kv()
            yield
            await self._give_to_engines()

    async def _trainer_in_place_of_kv(self) -> None:
        if self._trainer_is_away:
            await self._give_up({"kv_cache"}, self._engines())
            await self._trainer_back()

    async def _give_to_engines(self) -> None:
        if self._offload_train and not self._trainer_is_away:
            self._trainer_is_away = True
            await self._trainer.offload()
        await self._wake(set(self._tags))
        if self._restarts is not None:
            await self._restarts.allow()

    async def _trainer_back(self) -> None:
        if self._trainer_is_away:
            await self._trainer.onload()
            self._trainer_is_away = False

    async def _wake(self, tags: set[str]) -> None:
        wanted = [(engine, self._asleep.get(_process(engine), set()) & tags) for engine in self._engines()]
        await self._each("take memory back", "resume_memory_occupation", wanted)
        for asleep in self._asleep.values():
            asleep -= tags

    async def _give_up(self, tags: set[str], engines: Sequence[EngineEndpoint]) -> None:
        wanted = [(engine, self._release(engine, tags)) for engine in engines]
        await self._each("give memory up", "release_memory_occupation", wanted)

    def _release(self, engine: EngineEndpoint, tags: set[str]) -> set[str]:
        """What of `tags` an engine still has to give up; it counts as given."""
        asleep = self._asleep.setdefault(_process(engine), set())
        left = tags & set(self._tags) - asleep
        asleep |= left
        return left

    async def _each(self, what: str, route: str, wanted: Sequence[tuple[EngineEndpoint, set[str]]]) -> None:
        calls = [_ask(engine, route, sorted(tags)) for engine, tags in wanted if tags]
        if calls:
            await self._waits.on("engines", what, asyncio.gather(*calls))


def _process(engine: EngineEndpoint) -> tuple[str, int]:
    return engine.url, engine.pid


async def _ask(engine: EngineEndpoint, route: str, tags: list[str]) -> None:
    """Call a memory route. An engine that has died holds no memory; what becomes of the run is told by who watches it."""
    try:
        await while_alive([engine], control(engine, route, {"tags": tags}))
    except EngineError:
        if await is_alive(engine):
            raise
