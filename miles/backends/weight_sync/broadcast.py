"""The `broadcast` transport: what is sent is told by HTTP, the numbers go through a process group of source and engines."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from miles.backends.weight_sync.liveness import DEATH_NOTICE_S, died, living, while_alive
from miles.backends.weight_sync.process_group import UpdateGroup, address_towards, in_thread, serve_store
from miles.backends.weight_sync.records import SentWeights
from miles.backends.weight_sync.transport import Account, NamedTensor, SourceAlone, buckets, call
from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError, MilesError, WeightSyncError
from miles.utils.http_utils import split_host_port

ANSWER_GRACE_S = 5.0
"""Seconds in which engines tell why a broadcast failed for them."""
JOIN_TIMEOUT_S = 60.0
"""Seconds in which all members of a new group must have found each other."""
_Member = tuple[str, int, int]
T = TypeVar("T")


class BroadcastTransport(SourceAlone):
    """Rank 0 of a gloo group sends, the engines are ranks 1 and up.

    The group is kept from one update to the next; when an engine has joined or left, or an update has failed, it is left
    and another is made. No transfer of a bucket waits for longer than `timeout_s`.
    """

    def __init__(self, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._group: UpdateGroup | None = None
        self._name = ""
        self._members: dict[_Member, EngineEndpoint] = {}

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
        await self._join(engines)
        account = Account(engines)
        try:
            for bucket, last in buckets(named_tensors, self._bucket_bytes):
                await self._send_bucket(bucket, engines, str(version) if last else None)
                account.add(bucket)
        except BaseException:
            self.close()
            raise
        return account.sent(version, expected_nbytes, learned)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, {}

    async def _join(self, engines: Sequence[EngineEndpoint]) -> None:
        """Be in a group with exactly these engines."""
        members = {(e.url, e.pid, e.attachment): e for e in engines}
        if self._group is not None and self._members == members:
            return
        await self._dissolve()
        host, port = split_host_port(engines[0].url)
        address = address_towards(host, port)
        name = f"miles-weights-{uuid.uuid4().hex[:12]}"
        store, store_port = serve_store(address, min(JOIN_TIMEOUT_S, self._timeout_s))
        size = len(engines) + 1
        body = {
            "master_address": address,
            "master_port": store_port,
            "world_size": size,
            "group_name": name,
            "backend": "gloo",
        }
        calls = [
            call(e, "init_weights_update_group", body | {"rank_offset": rank})
            for rank, e in enumerate(engines, start=1)
        ]
        joined = in_thread(lambda: UpdateGroup(store, name, 0, size, address, self._timeout_s))
        self._group = await self._both(engines, joined, asyncio.gather(*calls), f"join the group {name}")
        self._name, self._members = name, members

    async def _dissolve(self) -> None:
        """Leave the present group, and let those of its engines that live leave it too."""
        if self._group is None:
            return
        left, name = await living(list(self._members.values())), self._name
        self.close()
        calls = [call(e, "destroy_weights_update_group", {"group_name": name}) for e in left]
        # An engine that was restarted at the same address, or that left after a failure, does not know the group.
        await asyncio.gather(*calls, return_exceptions=True)

    async def _send_bucket(
        self, bucket: list[NamedTensor], engines: Sequence[EngineEndpoint], version: str | None
    ) -> None:
        group = self._group
        assert group is not None  # `_join` made it
        flat = flatten([tensor for _, tensor in bucket])
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
        calls = asyncio.gather(*(call(e, "update_weights_from_distributed", body) for e in engines))
        await self._both(engines, in_thread(lambda: group.broadcast(flat)), calls, "take a bucket")

    async def _both(
        self,
        engines: Sequence[EngineEndpoint],
        ours: asyncio.Future[T],
        theirs: asyncio.Future[list[object]],
        what: str,
    ) -> T:
        """Await our side of a collective and the engines' answers; when either fails, tell which engine is to blame."""

        async def both() -> T:
            result, _ = await asyncio.gather(ours, theirs)
            return result

        try:
            return await while_alive(engines, both())
        except RuntimeError as error:  # from the group; the engines know more
            self.close()
            await asyncio.wait({theirs}, timeout=ANSWER_GRACE_S)
            raise await self._explain(engines, theirs, what, error) from error
        finally:
            theirs.cancel()

    async def _explain(
        self, engines: Sequence[EngineEndpoint], theirs: asyncio.Future[list[object]], what: str, error: RuntimeError
    ) -> MilesError:
        await asyncio.sleep(DEATH_NOTICE_S)
        alive = await living(engines)
        for engine in engines:
            if engine not in alive:
                return died(engine)
        if theirs.done() and not theirs.cancelled() and isinstance(told := theirs.exception(), EngineError):
            return told
        names = ", ".join(e.engine_id for e in engines)
        return WeightSyncError(
            f"{names} did not {what} within {self._timeout_s:.0f} s, or the connection broke: {error}\n"
            "    fix: look into the engines' logs; an engine that is stopped or swapped out cannot receive"
        )


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all tensors, end to end without gaps, as one uint8 tensor on the CPU."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in tensors])
