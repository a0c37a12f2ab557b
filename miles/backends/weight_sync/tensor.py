"""The `tensor` transport: weights in flattened buckets through memory that trainer and engine share."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from miles.backends.weight_sync.ranks import SOURCE, Prepared, TrainerRanks, deal
from miles.backends.weight_sync.records import SentWeights
from miles.backends.weight_sync.transport import Account, NamedTensor, buckets, call_each
from miles.core.run_facts import EngineEndpoint

logger = logging.getLogger(__name__)


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
    """Sends buckets of at most `bucket_bytes`, encoded by `codec`, to engines of this machine.

    A process that sees its own GPU alone cannot map memory of another. So where trainer ranks and engines share several
    GPUs, each rank encodes the bucket that it has gathered, on its GPU, and rank 0 hands each process of an engine the
    payload of the rank on that process's GPU. Elsewhere rank 0 encodes for all.
    """

    def __init__(self, codec: BucketCodec, bucket_bytes: int, ranks: TrainerRanks | None = None) -> None:
        """`ranks` None is a trainer of one rank."""
        self._codec, self._bucket_bytes = codec, bucket_bytes
        self._ranks = ranks or TrainerRanks()

    async def send(
        self,
        named_tensors: Iterable[NamedTensor],
        engines: Sequence[EngineEndpoint],
        *,
        version: int,
        expected_nbytes: Mapping[str, int],
        learned: bool,
    ) -> SentWeights:
        """As `Transport.send`; meanwhile the other ranks are in `follow`. WeightSyncError when one of them failed."""
        account = Account(engines)
        routes = self._ranks.routes(engines)
        takes_all = _takes_all(routes)
        for bucket, last in buckets(named_tensors, self._bucket_bytes):
            with _prepared(self._codec, bucket, _count(routes, SOURCE), tells=takes_all) as mine:
                try:
                    payloads = self._ranks.gather(mine) if takes_all else [mine.payloads]
                    await _post(engines, deal(routes, payloads), str(version) if last else None)
                    account.add(bucket)
                except BaseException as error:
                    if takes_all:
                        self._ranks.agree(str(error) or type(error).__name__)
                    raise
                if takes_all:
                    self._ranks.agree()
        return account.sent(version, expected_nbytes, learned)

    def follow(self, named_tensors: Iterable[NamedTensor], engines: Sequence[EngineEndpoint]) -> str:
        """What other ranks than 0 do meanwhile, with the same arguments; returns why the update failed, if it did.

        Rank 0 raises it. A rank whose payload nobody wants keeps no tensor.
        """
        routes = self._ranks.routes(engines)
        if not _takes_all(routes):
            return ""
        count = _count(routes, self._ranks.rank)
        if not count:
            named_tensors = ((name, tensor.to("meta")) for name, tensor in named_tensors)
        for bucket, _ in buckets(named_tensors, self._bucket_bytes):
            with _prepared(self._codec, bucket, count, tells=True) as mine:
                self._ranks.gather(mine)
                if failure := self._ranks.agree():
                    return failure
        return ""

    def close(self) -> None:
        """Nothing is kept between updates."""


def _takes_all(routes: Sequence[Sequence[int]]) -> bool:
    """Whether other ranks than 0 have something to do."""
    return any(rank != SOURCE for ranks in routes for rank in ranks)


def _count(routes: Sequence[Sequence[int]], rank: int) -> int:
    """How many processes map the memory of `rank`."""
    return sum(ranks.count(rank) for ranks in routes)


@contextmanager
def _prepared(codec: BucketCodec, bucket: list[NamedTensor], count: int, *, tells: bool) -> Iterator[Prepared]:
    """`count` payloads of an encoded bucket, whose memory is freed in the end.

    A failure to encode is raised, or, where the rank `tells` others, in what is yielded.
    """
    encoded = None
    try:
        try:
            if count:
                encoded = codec.encode(bucket)
                mine = Prepared([encoded.payload() for _ in range(count)])
            else:
                mine = Prepared([])
        except Exception as error:
            if not tells:
                raise
            logger.exception("a bucket of weights could not be encoded")
            mine = Prepared([], f"{type(error).__name__}: {error}")
        yield mine
    finally:
        if encoded is not None:
            encoded.close()


async def _post(engines: Sequence[EngineEndpoint], payloads: Sequence[list[str]], version: str | None) -> None:
    """Have every engine copy a bucket. They flush nothing: they are idle."""
    body = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": version}
    bodies = [body | {"serialized_named_tensors": own} for own in payloads]
    await call_each(engines, "update_weights_from_tensor", bodies)
