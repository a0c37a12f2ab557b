"""The `tensor` transport: weights in flattened buckets through memory that trainer and engine share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from miles.backends.weight_sync.records import SentWeights
from miles.backends.weight_sync.transport import Account, NamedTensor, buckets, call_each
from miles.core.run_facts import EngineEndpoint


class EncodedBucket(Protocol):
    """A bucket in shared memory."""

    def payload(self) -> str:
        """What travels over HTTP to one process that maps the memory; each process needs its own."""
        ...

    def close(self) -> None:
        """Free the memory, once every engine has copied it."""
        ...


class BucketCodec(Protocol):
    """How an engine wants its buckets: the one part of an update that belongs to the engine's adapter."""

    def encode(self, named_tensors: list[NamedTensor]) -> EncodedBucket:
        """Flatten tensors into one bucket."""
        ...


class TensorTransport:
    """Sends buckets of at most `bucket_bytes`, encoded by `codec`, to engines of this machine."""

    def __init__(self, codec: BucketCodec, bucket_bytes: int) -> None:
        self._codec, self._bucket_bytes = codec, bucket_bytes

    async def send(
        self,
        named_tensors: Iterable[NamedTensor],
        engines: Sequence[EngineEndpoint],
        *,
        version: int,
        expected_nbytes: Mapping[str, int],
        learned: bool,
    ) -> SentWeights:
        """As `Transport.send`."""
        return await send(
            named_tensors,
            engines,
            self._codec,
            version=version,
            bucket_bytes=self._bucket_bytes,
            expected_nbytes=expected_nbytes,
            learned=learned,
        )

    def close(self) -> None:
        """Nothing is kept between updates."""


async def send(
    named_tensors: Iterable[NamedTensor],
    engines: Sequence[EngineEndpoint],
    codec: BucketCodec,
    *,
    version: int,
    bucket_bytes: int,
    expected_nbytes: Mapping[str, int],
    learned: bool,
) -> SentWeights:
    """Send every tensor to every engine; the version goes with the last bucket. Engines flush nothing: they are idle."""
    account = Account(engines)
    for bucket, last in buckets(named_tensors, bucket_bytes):
        encoded = codec.encode(bucket)
        try:
            body = {
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": str(version) if last else None,
            }
            bodies = [body | {"serialized_named_tensors": [encoded.payload() for _ in range(e.tp)]} for e in engines]
            await call_each(engines, "update_weights_from_tensor", bodies)
        finally:
            encoded.close()
        account.add(bucket)
    return account.sent(version, expected_nbytes, learned)
