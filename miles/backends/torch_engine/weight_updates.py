"""Weights that arrive through a process group or lie in a folder: received or read, before the engine takes them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from miles.backends.torch_engine.control_routes import field
from miles.backends.torch_engine.request import RequestRefused
from miles.backends.torch_engine.weights import NamedTensors
from miles.backends.weight_sync.process_group import UpdateGroup, in_thread, join
from miles.errors import EngineError
from miles.utils.http_utils import url_of

GROUP_TIMEOUT_S = 120.0
"""Seconds that joining a group, or receiving one bucket, may take."""
DEFAULT_GROUP = "weight_update_group"
"""The group's name where a request gives none."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Announced:
    """What the tensors of one bucket look like, told before they are received."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[list[int]]
    flattened: bool
    """The bytes of all tensors come end to end in one uint8 tensor, rather than each tensor by itself."""


def read_announcement(body: dict[str, Any]) -> Announced:
    """Names, dtypes, shapes and load format of a bucket. Raises RequestRefused."""
    names, dtypes, shapes = (field(body, key, list, None) for key in ("names", "dtypes", "shapes"))
    if names is None or dtypes is None or shapes is None or not len(names) == len(dtypes) == len(shapes):
        raise RequestRefused("names, dtypes and shapes are lists with one entry for each tensor")
    load_format = field(body, "load_format", str, None)
    if load_format not in (None, "flattened_bucket"):
        raise RequestRefused(f'load_format is {load_format!r}; leave it out, or give "flattened_bucket"')
    found: list[torch.dtype] = []
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, str(dtype_name).removeprefix("torch."), None)
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise RequestRefused(f"{name!r}: {dtype_name!r} is not a dtype")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise RequestRefused(f"{name}: {shape!r} is not a shape")
        found.append(dtype)
    return Announced(names, found, shapes, load_format is not None)


class UpdateGroups:
    """The groups that this engine is in, by name. All methods run on the event loop, which waits in none of them."""

    def __init__(self) -> None:
        self._groups: dict[str, UpdateGroup] = {}

    async def join(self, body: dict[str, Any]) -> None:
        """Join a group as SGLang's route describes it; this engine is one rank, `rank_offset`. Raises RequestRefused."""
        name, host = field(body, "group_name", str, DEFAULT_GROUP), field(body, "master_address", str, None)
        port, rank, size = (field(body, key, int, None) for key in ("master_port", "rank_offset", "world_size"))
        backend = field(body, "backend", str, "gloo")
        if host is None or port is None or rank is None or size is None or not 0 < rank < size:
            raise RequestRefused(
                "master_address, master_port, rank_offset and world_size describe a group whose rank 0 sends: "
                f"{host!r}, {port!r}, {rank!r}, {size!r} do not"
            )
        if backend != "gloo":
            raise RequestRefused(f'backend is {backend!r}; the torch engine receives through "gloo"')
        if name in self._groups:
            raise RequestRefused(f"group {name!r} exists; POST /destroy_weights_update_group first")
        try:
            self._groups[name] = await in_thread(lambda: join(host, port, name, rank, size, GROUP_TIMEOUT_S))
        except (RuntimeError, EngineError) as error:
            at = url_of(host, port, "tcp")
            raise RequestRefused(f"group {name!r} at {at} could not be joined: {error}") from error

    async def receive(self, name: str, announced: Announced) -> NamedTensors:
        """Receive the tensors of one bucket.

        Raises RequestRefused for an unknown group, and RuntimeError when the transfer broke or took too long; the group
        is left then.
        """
        group = self._groups.get(name)
        if group is None:
            raise RequestRefused(f"there is no group {name!r}; POST /init_weights_update_group first")
        try:
            return await in_thread(lambda: _receive(group, announced))
        except BaseException:
            self._leave(name)
            raise

    def destroy(self, name: str) -> None:
        """Leave a group. Raises RequestRefused when there is none of that name."""
        if name not in self._groups:
            raise RequestRefused(f"there is no group {name!r}")
        self._leave(name)

    def _leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.close()


def _receive(group: UpdateGroup, announced: Announced) -> NamedTensors:
    specs = list(zip(announced.names, announced.dtypes, announced.shapes, strict=True))
    if not announced.flattened:
        named = [(name, torch.empty(shape, dtype=dtype)) for name, dtype, shape in specs]
        for _, tensor in named:
            group.broadcast(tensor)
        return named
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in specs]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.broadcast(flat)
    pieces = flat.split(sizes)
    # A piece may begin anywhere, and a view of another dtype must begin at a multiple of its size: hence the copy.
    return [
        (name, piece.clone().view(dtype).view(shape))
        for (name, dtype, shape), piece in zip(specs, pieces, strict=True)
    ]


def read_folder(folder: str) -> NamedTensors:
    """Every tensor of a model folder's safetensors files. Raises RequestRefused for a folder that cannot be read."""
    path = Path(folder)
    try:
        named: NamedTensors = []
        for file in _weight_files(path):
            with safe_open(file, framework="pt") as stream:
                named += [(name, stream.get_tensor(name)) for name in stream.keys()]  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RequestRefused(f"nothing was loaded: the weights of {path} cannot be read: {error}") from error
    if not named:
        raise RequestRefused(f"nothing was loaded: {path} holds no *.safetensors")
    return named


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder that this engine can see")
    return sorted(path.glob("*.safetensors"))
