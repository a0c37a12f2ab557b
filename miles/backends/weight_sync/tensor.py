"""The `tensor` transport: weights in flattened buckets through memory that trainer and engine share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from miles.backends.weight_sync.checksum import checksum_tensor
from miles.backends.weight_sync.lifecycle import control
from miles.backends.weight_sync.records import SentWeights
from miles.core.run_facts import EngineEndpoint

NamedTensor = tuple[str, torch.Tensor]


class EncodedBucket(Protocol):
    """A bucket in shared memory; `payload` is what travels over HTTP."""

    payload: str

    def close(self) -> None:
        """Free the memory, once every engine has copied it."""
        ...


class BucketCodec(Protocol):
    """How an engine wants its buckets: the one part of an update that belongs to the engine's adapter."""

    def encode(self, named_tensors: list[NamedTensor]) -> EncodedBucket:
        """Flatten tensors into one bucket."""
        ...


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
    started_at = time.monotonic()
    nbytes: dict[str, int] = {}
    sums: dict[str, str] = {}
    count = 0
    for bucket, last in buckets(named_tensors, bucket_bytes):
        encoded = codec.encode(bucket)
        try:
            body = {
                "serialized_named_tensors": [encoded.payload],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": str(version) if last else None,
            }
            await asyncio.gather(*(control(e, "update_weights_from_tensor", body) for e in engines))
        finally:
            encoded.close()
        nbytes |= {name: tensor.nbytes for name, tensor in bucket}
        sums |= {name: checksum_tensor(tensor) for name, tensor in bucket}
        count += 1
    return SentWeights(
        version=version,
        nbytes=nbytes,
        checksums=sums,
        expected_nbytes=dict(expected_nbytes),
        learned=learned,
        buckets=count,
        seconds=time.monotonic() - started_at,
    )
