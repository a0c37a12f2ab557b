"""Which transport goes by which name."""

from __future__ import annotations

from pathlib import Path

from miles.backends.weight_sync.broadcast import BroadcastTransport
from miles.backends.weight_sync.disk import DiskTransport
from miles.backends.weight_sync.ranks import TrainerRanks
from miles.backends.weight_sync.records import TransportName
from miles.backends.weight_sync.tensor import BucketCodec, TensorTransport
from miles.backends.weight_sync.transport import Transport

BROADCAST_TIMEOUT_S = 120.0
"""Seconds in which a bucket must have reached all engines."""


def build_transport(
    name: TransportName,
    *,
    codec: BucketCodec,
    bucket_bytes: int,
    disk_folder: Path,
    model_folder: Path,
    ranks: TrainerRanks | None = None,
) -> Transport:
    """The transport called `name`; nothing is opened before its first `send`. `ranks` None is a trainer of one rank."""
    if name == "broadcast":
        return BroadcastTransport(bucket_bytes, BROADCAST_TIMEOUT_S)
    if name == "disk":
        return DiskTransport(disk_folder, model_folder, bucket_bytes)
    return TensorTransport(codec, bucket_bytes, ranks)
