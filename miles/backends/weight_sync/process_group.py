"""The process group of a weight update: one source and its engines, apart from the trainer's own group.

Source and engines use this one file. The group is made from torch's gloo backend directly, so that it needs no default
group, and a process can be in several. Its keys in the store are those of a group that torch itself would make under the
same name, so that an engine that joins by torch's own helper finds the source.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from miles.errors import EngineError
from miles.utils.http_utils import bind_socket

T = TypeVar("T")
Gloo: Any = dist.ProcessGroupGloo
"""torch's type stubs know neither its options nor its collectives."""
SOURCE = 0
"""The rank that sends."""


class UpdateGroup:
    """One member of a group. Every wait ends after `timeout_s`, and at once when another member's process ends."""

    def __init__(self, store: Store, name: str, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """Connect with all other members; blocks until they are there.

        `address` is the literal of this machine under which the others reach it. Raises RuntimeError.
        """
        options = Gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [Gloo.create_device(hostname=address)]
        keys = PrefixStore(name, store)
        for prefix in (f"{name}/", "cpu/"):
            keys = PrefixStore(prefix, keys)
        self._store = store  # the source's serves the others' look-ups as long as it lives
        self._group: Any = Gloo(keys, rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a contiguous CPU tensor of the source to all others, or receive into it; blocks. Raises RuntimeError."""
        if self._group is None:
            raise RuntimeError("the group was left")
        if tensor.numel():
            self._group.broadcast(tensor, SOURCE).wait()

    def close(self) -> None:
        """Leave; the others' waits end with an error."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


def serve_store(address: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store on a free port of `address`, and the port. Nobody else can take the port in between."""
    listening = bind_socket(address, 0)
    port = listening.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


def join(host: str, port: int, name: str, rank: int, world_size: int, timeout_s: float) -> UpdateGroup:
    """Join as `rank` the group `name` whose store is at `host`:`port`; blocks. Raises RuntimeError or EngineError."""
    address = address_towards(host, port)
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    return UpdateGroup(store, name, rank, world_size, address, timeout_s)


def address_towards(host: str, port: int) -> str:
    """The IP literal of this machine from which packets to `host` leave; loopback for this machine itself."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket sends nothing when it connects
            return probe.getsockname()[0]
    except OSError as error:
        raise EngineError(f"no way from this machine to {host}: {error}; check that the name resolves") from error


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking `work` on a thread that does not keep the process alive, beside the running event loop."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return  # the caller has given up
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed on whole
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    answer.add_done_callback(_forget)
    threading.Thread(target=run, name="weight-update-group", daemon=True).start()
    return answer


def _forget(answer: asyncio.Future[Any]) -> None:
    """Take note of how work ended whose caller has given up, so that asyncio does not report it as never looked at."""
    if not answer.cancelled():
        answer.exception()
