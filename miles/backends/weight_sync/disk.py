"""The `disk` transport: a model folder that engines load and that is removed afterwards."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from miles.backends.weight_sync.records import SentWeights
from miles.backends.weight_sync.transport import Account, NamedTensor, SourceAlone, buckets, call_all
from miles.core.run_facts import EngineEndpoint
from miles.errors import WeightSyncError

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"\.?weight_v\d{6,}(\.partial)?")
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


class DiskTransport(SourceAlone):
    """Writes `folder/weight_v{version:06d}` beside its final name, renames it, has engines load it, and removes it.

    Trainer and engines must see `folder` under the same path. It belongs to one trainer at a time, which holds a lock on
    it; whatever an earlier one has left there is removed. Config and tokenizer files come from `model_folder`.
    """

    def __init__(self, folder: Path, model_folder: Path, shard_bytes: int) -> None:
        self._folder, self._model_folder, self._shard_bytes = folder.absolute(), model_folder, shard_bytes
        self._lock: int | None = None

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
        account = Account(engines)
        with self._failures_told():
            self._take_folder()
            target = self._write(named_tensors, version, account)
        try:
            body = {"model_path": str(target), "load_format": "auto", "flush_cache": False}
            await call_all(engines, "update_weights_from_disk", body | {"weight_version": str(version)})
        finally:
            await asyncio.to_thread(self._remove_leftovers)
        return account.sent(version, expected_nbytes, learned)

    def close(self) -> None:
        """Give the folder up."""
        if self._lock is not None:
            self._remove_leftovers()
            os.close(self._lock)
            self._lock = None

    def _take_folder(self) -> None:
        if self._lock is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise WeightSyncError(
                f"{self._folder}: another run writes its weights there\n"
                "    fix: give each run its own --update-weight-disk-dir"
            ) from error
        self._lock = lock
        self._remove_leftovers()

    def _write(self, named_tensors: Iterable[NamedTensor], version: int, account: Account) -> Path:
        target = self._folder / f"weight_v{version:06d}"
        partial = target.with_name(f".{target.name}.partial")
        for stale in (partial, target):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
        for file in sorted(self._model_folder.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_ENDINGS):
                shutil.copyfile(file, partial / file.name)
        weight_map: dict[str, str] = {}
        for number, (bucket, _) in enumerate(buckets(named_tensors, self._shard_bytes), start=1):
            shard = f"model-{number:05d}.safetensors"
            tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in bucket}
            save_file(tensors, partial / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, shard)
            account.add(bucket)
        index = {"metadata": {"total_size": account.total_bytes}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=1))
        os.replace(partial, target)
        return target

    def _remove_leftovers(self) -> None:
        for path in self._folder.iterdir():
            if path.is_dir() and _OURS.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            if self._lock is not None:
                self._remove_leftovers()
            raise WeightSyncError(
                f"{self._folder}: the weights cannot be written there: {error} ({_space(self._folder)})\n"
                "    fix: free space or give --update-weight-disk-dir a folder that this user may write to and that has "
                "room for one copy of the model; --update-weight-transfer-mode broadcast needs no disk"
            ) from error


def _space(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free"
