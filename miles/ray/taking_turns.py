"""`TakingTurns`: trainer and engines on the same memory, of which whoever does not work gives up its part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from miles.backends.weight_sync.lifecycle import control
from miles.core.run_facts import EngineEndpoint
from miles.utils.waits import Waits

TAGS = {"kv_cache": "kv_cache", "weight": "weights"}
"""What `--offload-rollout-level` calls the parts of an engine's memory, and what engines call them."""


class TakingTurns:
    """Placement of a run whose trainer and engines share GPUs.

    ```
    rollout   engines: weights, KV     trainer: away
    training  engines: away            trainer: there
    publish   engines: weights         trainer: there      KV comes back when the trainer has gone: the two do not fit
    ```
    `engines` gives those that live; one that has just started has all its memory. `tags` is what engines give up (of
    `TAGS`), nothing when it is empty.
    """

    def __init__(
        self,
        trainer: Any,
        engines: Callable[[], Sequence[EngineEndpoint]],
        waits: Waits,
        *,
        offload_train: bool,
        tags: Sequence[str],
    ) -> None:
        self._trainer, self._engines, self._waits = trainer, engines, waits
        self._offload_train, self._tags = offload_train, tuple(tags)
        self._trainer_is_away = False
        self._asleep: dict[str, set[str]] = {}

    @asynccontextmanager
    async def for_rollout(self) -> AsyncIterator[None]:
        """The engines have all their memory."""
        await self._give_to_engines()
        yield

    @asynccontextmanager
    async def for_training(self) -> AsyncIterator[None]:
        """The trainer has all of its memory; it keeps it for the publish that follows."""
        tags = set(self._tags)
        await self._each("give memory up", "release_memory_occupation", lambda engine: self._release(engine, tags))
        await self._trainer_back()
        yield

    @asynccontextmanager
    async def for_weight_sync(self) -> AsyncIterator[None]:
        """The trainer's weights and room for the engines' are there; afterwards the engines have all their memory."""
        await self._trainer_back()
        await self._wake({"weights"})
        yield
        await self._give_to_engines()

    @asynccontextmanager
    async def for_scoring(self) -> AsyncIterator[None]:
        """The trainer's weights are there, in the place of the engines' KV; afterwards the engines have all their memory."""
        if self._trainer_is_away:
            await self._each("give the KV up", "release_memory_occupation", lambda e: self._release(e, {"kv_cache"}))
            await self._trainer_back()
        yield
        await self._give_to_engines()

    async def _give_to_engines(self) -> None:
        if self._offload_train and not self._trainer_is_away:
            self._trainer_is_away = True
            await self._trainer.offload()
        await self._wake(set(self._tags))

    async def _trainer_back(self) -> None:
        if self._trainer_is_away:
            await self._trainer.onload()
            self._trainer_is_away = False

    async def _wake(self, tags: set[str]) -> None:
        def missing(engine: EngineEndpoint) -> set[str]:
            return self._asleep.get(engine.url, set()) & tags

        await self._each("take memory back", "resume_memory_occupation", missing)
        for asleep in self._asleep.values():
            asleep -= tags

    def _release(self, engine: EngineEndpoint, tags: set[str]) -> set[str]:
        """What of `tags` an engine still has to give up; it counts as given."""
        asleep = self._asleep.setdefault(engine.url, set())
        left = tags & set(self._tags) - asleep
        asleep |= left
        return left

    async def _each(self, what: str, route: str, tags_of: Callable[[EngineEndpoint], set[str]]) -> None:
        wanted = [(engine, sorted(tags_of(engine))) for engine in self._engines()]
        calls = [control(engine, route, {"tags": tags}) for engine, tags in wanted if tags]
        if calls:
            await self._waits.on("engines", what, asyncio.gather(*calls))
