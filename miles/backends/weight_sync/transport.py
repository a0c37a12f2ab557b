"""What the transports share: their face, buckets, the account of what was sent, and calls to engines that may die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from miles.backends.weight_sync.checksum import checksum_tensor
from miles.backends.weight_sync.lifecycle import control
from miles.backends.weight_sync.liveness import DEATH_NOTICE_S, died, is_alive, while_alive
from miles.backends.weight_sync.records import SentWeights
from miles.core.run_facts import EngineEndpoint
from miles.utils.http_utils import HttpError, TransportError

NamedTensor = tuple[str, torch.Tensor]


class Transport(Protocol):
    """Brings weights from the trainer's rank 0 to engines. It may keep connections from one update to the next."""

    async def send(
        self,
        named_tensors: Iterable[NamedTensor],
        engines: Sequence[EngineEndpoint],
        *,
        version: int,
        expected_nbytes: Mapping[str, int],
        learned: bool,
    ) -> SentWeights:
        """Send every tensor to every engine, in order; the version goes with the last.

        Engines flush nothing: they are idle. Raises WeightSyncError, or EngineError that names an engine which died or
        refused.
        """
        ...

    def follow(self, named_tensors: Iterable[NamedTensor], engines: Sequence[EngineEndpoint]) -> str:
        """What the other ranks do while rank 0 sends; returns why the update failed, where they are told. Rank 0 raises it."""
        ...

    def close(self) -> None:
        """Give up connections and files."""
        ...


class SourceAlone:
    """A transport for which the other ranks do nothing but gather tensors with rank 0."""

    def follow(self, named_tensors: Iterable[NamedTensor], engines: Sequence[EngineEndpoint]) -> str:
        """As `Transport.follow`: nothing."""
        return ""


def buckets(named_tensors: Iterable[NamedTensor], size_bytes: int) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Group tensors in order into buckets of at most `size_bytes` (a larger tensor gets its own), marking the last."""
    bucket: list[NamedTensor] = []
    held = 0
    for name, tensor in named_tensors:
        if bucket and held + tensor.nbytes > size_bytes:
            yield bucket, False
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    yield bucket, True


class Account:
    """Counts what one update sends to `engines`, with checksums where they report theirs by the same names."""

    def __init__(self, engines: Sequence[EngineEndpoint]) -> None:
        self._by_name = any(engine.kind == "torch" for engine in engines)
        self._started_at = time.monotonic()
        self._nbytes: dict[str, int] = {}
        self._checksums: dict[str, str] = {}
        self._buckets = 0

    def add(self, bucket: Sequence[NamedTensor]) -> None:
        """Note the tensors of a bucket that every engine has taken."""
        self._nbytes |= {name: tensor.nbytes for name, tensor in bucket}
        if self._by_name:
            self._checksums |= {name: checksum_tensor(tensor) for name, tensor in bucket}
        self._buckets += 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors so far."""
        return sum(self._nbytes.values())

    def sent(self, version: int, expected_nbytes: Mapping[str, int], learned: bool) -> SentWeights:
        """The record of the whole update."""
        return SentWeights(
            version=version,
            nbytes=self._nbytes,
            checksums=self._checksums,
            expected_nbytes=dict(expected_nbytes),
            learned=learned,
            buckets=self._buckets,
            seconds=time.monotonic() - self._started_at,
        )


async def call(engine: EngineEndpoint, route: str, body: Any) -> Any:
    """POST a control route; an engine whose process has ended is named as dead."""
    try:
        return await control(engine, route, body)
    except TransportError as error:
        await asyncio.sleep(DEATH_NOTICE_S)
        if not await is_alive(engine):
            raise died(engine) from error
        raise
    except HttpError as error:
        error.add_note(f"the answer is of {engine.engine_id}, log: {engine.log_path}")
        raise


async def call_all(engines: Sequence[EngineEndpoint], route: str, body: Any) -> None:
    """POST a control route of every engine at once; ends with an error as soon as one dies or refuses."""
    await call_each(engines, route, [body] * len(engines))


async def call_each(engines: Sequence[EngineEndpoint], route: str, bodies: Sequence[Any]) -> None:
    """As `call_all`, with a body of its own for each engine."""
    calls = [call(engine, route, body) for engine, body in zip(engines, bodies, strict=True)]
    await while_alive(engines, asyncio.gather(*calls))
