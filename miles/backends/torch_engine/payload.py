"""The wire of a tensor update on CPU: one flattened bucket in shared memory, described by a line of JSON.

Imports torch and the standard library only, since the trainer loads it by path. Files are plain files in /dev/shm
rather than `multiprocessing.shared_memory`, whose tracker unlinks a segment when the process that merely read it ends.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import re
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_PREFIX = "miles-weights-"
_NAME = re.compile(r"miles-weights-[0-9a-f]{32}")
_ALIGN = 64
_ABANDONED_AFTER_S = 60.0


class EncodedBucket:
    """A bucket in shared memory; `payload()` describes it, `close()` (or leaving the `with` block) removes it."""

    def __init__(self, payload: str, path: Path, descriptor: int) -> None:
        self._payload = payload
        self._path = path
        self._descriptor: int | None = descriptor

    def payload(self) -> str:
        """Where the bucket is and what it holds, the same for every reader."""
        return self._payload

    def close(self) -> None:
        """Remove the segment; a second call does nothing."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> EncodedBucket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class SharedMemoryCodec:
    """Named tensors to and from one flattened uint8 buffer in shared memory."""

    def encode(self, named_tensors: list[tuple[str, torch.Tensor]]) -> EncodedBucket:
        """Write the tensors of one bucket, in their order and dtype.

        The bucket keeps its segment until `close()`. Raises OSError when shared memory cannot hold the bucket.
        """
        entries: list[dict[str, Any]] = []
        end = 0
        for name, tensor in named_tensors:
            start = -(-end // _ALIGN) * _ALIGN
            end = start + tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "start": start, "end": end})
        folder = _folder()
        _remove_abandoned(folder)
        path = folder / f"{_PREFIX}{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # held while the owner lives: see _remove_abandoned
            if end:
                _reserve(descriptor, end, folder)
                with mmap.mmap(descriptor, end) as memory:
                    buffer = torch.frombuffer(memory, dtype=torch.uint8)
                    for (_, tensor), entry in zip(named_tensors, entries, strict=True):
                        if entry["end"] > entry["start"]:
                            place = buffer[entry["start"] : entry["end"]].view(tensor.dtype).view(tensor.shape)
                            place.copy_(tensor.detach())
                            del place
                    del buffer
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return EncodedBucket(json.dumps({"shm": path.name, "nbytes": end, "tensors": entries}), path, descriptor)

    def decode(self, payload: str) -> list[tuple[str, torch.Tensor]]:
        """Copy the tensors of a bucket out of shared memory.

        Raises ValueError for a payload that does not describe a bucket, OSError when the segment is gone.
        """
        name, nbytes, entries = _read_header(payload)
        if nbytes == 0:
            return [(entry_name, torch.empty(shape, dtype=dtype)) for entry_name, dtype, shape, _, _ in entries]
        path = _folder() / name
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"shared memory {name} does not exist on this node: the sender closed the bucket before it was read, "
                "or runs on another machine or in another container without a shared /dev/shm"
            ) from None
        try:
            size = os.fstat(descriptor).st_size
            if size < nbytes:
                raise ValueError(f"shared memory {name} holds {size} bytes, the payload announces {nbytes}")
            memory = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        named = [
            (entry_name, buffer[start:end].clone().view(dtype).view(shape))
            for entry_name, dtype, shape, start, end in entries
        ]
        del buffer
        memory.close()
        return named


_Entry = tuple[str, torch.dtype, list[int], int, int]


def _read_header(payload: str) -> tuple[str, int, list[_Entry]]:
    try:
        header = json.loads(payload)
        name, nbytes, tensors = header["shm"], header["nbytes"], header["tensors"]
        raw = [(t["name"], t["dtype"], t["shape"], t["start"], t["end"]) for t in tensors]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"a payload is JSON with shm, nbytes and tensors; this one is not ({error!r})") from error
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a weight bucket")
    if not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes is {nbytes!r}, not a size")
    entries: list[_Entry] = []
    for entry_name, dtype_name, shape, start, end in raw:
        dtype = getattr(torch, str(dtype_name), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry_name}: {dtype_name!r} is not a dtype")
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"{entry_name}: {shape!r} is not a shape")
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= nbytes):
            raise ValueError(f"{entry_name}: bytes {start!r} to {end!r} lie outside a bucket of {nbytes} bytes")
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{entry_name}: {end - start} bytes do not hold shape {shape} of {dtype_name}")
        entries.append((str(entry_name), dtype, shape, start, end))
    return name, nbytes, entries


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _reserve(descriptor: int, nbytes: int, folder: Path) -> None:
    """Claim all pages now: writing to pages that do not exist would end the process with SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        stat = os.statvfs(folder)
        raise OSError(
            error.errno,
            f"{folder} has {stat.f_bavail * stat.f_frsize / 2**20:.0f} MiB free, a weight bucket needs "
            f"{nbytes / 2**20:.0f} MiB: lower --update-weight-buffer-size, or enlarge {folder} (docker: --shm-size)",
        ) from error


def _remove_abandoned(folder: Path) -> None:
    """Remove buckets whose owner died before `close()`: nobody holds their lock any more."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            stat = path.stat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < _ABANDONED_AFTER_S:
                continue
            descriptor = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
