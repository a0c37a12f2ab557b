"""Which engines still accept connections, and work that ends as soon as one does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.utils.http_utils import split_host_port
from miles.utils.process import last_lines

T = TypeVar("T")
LOOK_INTERVAL_S = 0.5
CONNECT_TIMEOUT_S = 5.0
DEATH_NOTICE_S = 0.3
"""Seconds after which the port of a process that has just been killed is surely closed."""


async def is_alive(engine: EngineEndpoint) -> bool:
    """Whether the engine's port accepts connections. One that is merely slow counts as alive."""
    host, port = split_host_port(engine.url)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_TIMEOUT_S)
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True


async def living(engines: Sequence[EngineEndpoint]) -> list[EngineEndpoint]:
    """The engines that are alive, in their order."""
    answers = await asyncio.gather(*map(is_alive, engines))
    return [engine for engine, alive in zip(engines, answers, strict=True) if alive]


async def while_alive(engines: Sequence[EngineEndpoint], work: Awaitable[T]) -> T:
    """Await `work`; when an engine dies meanwhile, cancel it and raise EngineError that names the engine.

    Without this a call to an engine that has just died would be tried again until its retries are used up.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_first_death(engines))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise died(watch.result())
        return task.result()
    finally:
        for future in (task, watch):
            if not future.done():
                future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def died(engine: EngineEndpoint) -> EngineError:
    """The error of an engine that does not accept connections any more."""
    whose = "started by somebody else" if engine.attachment else f"process {engine.pid}"
    return EngineError(
        f"the engine ({whose}) died during a weight update: {engine.url} refuses connections",
        engine=engine.engine_id,
        log_path=engine.log_path,
        last_lines=last_lines(engine.log_path) if engine.log_path else "",
    )


async def _first_death(engines: Sequence[EngineEndpoint]) -> EngineEndpoint:
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        alive = await living(engines)
        for engine in engines:
            if engine not in alive:
                return engine
