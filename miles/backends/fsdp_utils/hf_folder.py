"""What a model folder in Hugging Face format holds, read from its files alone, and how one is written."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from miles.backends.fsdp_utils.tensor_file import DTYPES, StoredTensor, write_tensors
from miles.errors import CheckpointError

FLOATS = [code for code, dtype in DTYPES.items() if dtype.is_floating_point]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


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
            if entry["dtype"] not in FLOATS:
                raise CheckpointError(
                    f"{file}: {name} is stored as {entry['dtype']}; only {', '.join(FLOATS)} can be trained"
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


def require_equal_heads(folder: Path) -> None:
    """Of a folder that ties the head to the embedding and yet stores both: raise CheckpointError when they differ."""
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as stream:
            found |= {n: stream.get_tensor(n) for n in stream.keys() if n in (HEAD, EMBEDDING)}  # noqa: SIM118
    if len(found) == 2 and not torch.equal(found[HEAD], found[EMBEDDING]):
        raise CheckpointError(
            f"{folder}: config.json says tie_word_embeddings, but {HEAD} and {EMBEDDING} differ"
            f"\n    fix: set tie_word_embeddings to false, or remove {HEAD}"
        )


def require_same_names(exported: Collection[str], source: Collection[str]) -> None:
    """Raise CheckpointError when an export would lack a tensor of the folder it came from, or add one."""
    problems = [
        f"{len(names)} {what}: {', '.join(names[:5])}"
        for what, names in (
            ("missing", sorted(set(source) - set(exported))),
            ("unexpected", sorted(set(exported) - set(source))),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the tensors of the trained model are not those of the folder it came from: {'; '.join(problems)}"
            "\n    fix: give --hf-checkpoint the folder that the run was started with"
        )


def write_model_folder(
    source: Path, target: Path, stored: Mapping[str, StoredTensor], tensor: Callable[[str], Tensor]
) -> None:
    """Write a model folder: `stored` as model.safetensors, every other file but weights copied byte by byte from `source`.

    `tensor(name)` is called for one name after another, so that only one has to be in memory; it is cast to the data
    type in `stored`. The folder appears under its name only when it is complete. Raises CheckpointError when it exists
    and is not empty, and OSError when the disk refuses.
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
    try:
        for file in sorted(source.iterdir()):
            if file.is_file() and not _is_weights(file.name):
                shutil.copyfile(file, partial / file.name)
        tensors = ((name, tensor(name).to(described.dtype)) for name, described in stored.items())
        write_tensors(partial / "model.safetensors", stored, tensors, {"format": "pt"})
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_weights(name: str) -> bool:
    endings = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
    return name.endswith(endings)
