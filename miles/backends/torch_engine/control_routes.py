"""What the engine's control routes share: how one is added, runs between two steps, and reads its body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.request import RequestRefused

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Control(Protocol):
    """Adds one control route: its path, the body fields it knows, and what it does."""

    def __call__(
        self, path: str, known: frozenset[str], handler: Handler, methods: tuple[str, ...] = ("POST",)
    ) -> None: ...


async def on_engine(engine: Engine, action: Callable[[], Any]) -> Any:
    """Run `action` on the engine's thread between two steps."""
    return await asyncio.wrap_future(engine.call(action))


def field(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A body's field of a type, or the default where it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestRefused(f"{name} is {value!r}; it must be of type {kind.__name__}")
    return value
