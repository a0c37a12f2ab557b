"""What a model folder in Hugging Face format holds, read from its files alone, and how one is written."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from miles.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a safetensors header describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def require_model_folder(folder: str | Path) -> Path:
    """The folder as a path; raises CheckpointError when it is missing or lacks config.json or safetensors."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such model folder\n    fix: pass --hf-checkpoint a folder with config.json")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json\n    fix: pass a model folder in Hugging Face format")
    if not weight_files(path):
        raise CheckpointError(
            f"{path}: no *.safetensors\n    fix: save the model with save_pretrained; other weight formats are not read"
        )
    return path


def weight_files(folder: Path) -> list[Path]:
    """The weight files that the folder's index names, or all safetensors when it has no index."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if missing := [f.name for f in files if not f.is_file()]:
        raise CheckpointError(f"{folder}: {INDEX} names missing files: {', '.join(missing)}\n    fix: copy them too")
    return files


def stored_tensors(folder: str | Path, *, tied: bool) -> dict[str, StoredTensor]:
    """Name, shape and dtype of every tensor in the folder, from the safetensors headers.

    With `tied` the copy of the output head is left out when the input embedding is there too.
    Raises CheckpointError on an unreadable header and on a dtype that is not a float.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(require_model_folder(folder)):
        for name, entry in _header(file).items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"{file}: {name} is stored as {entry['dtype']}; only {', '.join(DTYPES)} can be trained"
                    "\n    fix: convert the model to one of them"
                )
            found[name] = StoredTensor(tuple(entry["shape"]), DTYPES[entry["dtype"]])
    if tied and any(name.endswith("embed_tokens.weight") for name in found):
        found.pop(HEAD, None)
    return found


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= length <= file.stat().st_size - 8:
            raise CheckpointError(f"{file}: not a complete safetensors file\n    fix: copy or write it again")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header


def write_model_folder(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a model folder: `tensors` as model.safetensors, every other file but weights copied from `source`.

    The folder appears under its name only when it is complete. Raises CheckpointError when it exists and is not empty.
    """
    if target.exists():
        if not target.is_dir() or any(target.iterdir()):
            raise CheckpointError(
                f"{target}: exists already and is not an empty folder\n    fix: choose another folder"
            )
        target.rmdir()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not _is_weights(file.name):
            shutil.copyfile(file, partial / file.name)
    save_file(dict(tensors), partial / "model.safetensors", metadata={"format": "pt"})
    os.replace(partial, target)


def _is_weights(name: str) -> bool:
    endings = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
    return name.endswith(endings)
