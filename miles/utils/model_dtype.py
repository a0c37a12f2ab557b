"""What a model folder says of itself, read from its files alone: its configuration, and its data type."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Data types of safetensors that an engine can hold, by their names in torch."""


def model_dtype(folder: str | Path) -> str:
    """`float32`, `bfloat16` or `float16`: what the folder's config.json says, else what its first weight is stored as.

    A folder that says neither counts as float32.
    """
    path = Path(folder)
    config = model_config(path)
    named = config.get("dtype", config.get("torch_dtype"))
    if named in FLOATS.values():
        return cast(str, named)
    for file in sorted(path.glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name != "__metadata__" and entry.get("dtype") in FLOATS:
                return FLOATS[entry["dtype"]]
    return "float32"


def num_parameters(folder: str | Path) -> int:
    """Numbers in the folder's safetensors files, by their headers; 0 when there are none."""
    headers = map(_header, sorted(Path(folder).glob("*.safetensors")))
    return sum(math.prod(e["shape"]) for header in headers for name, e in header.items() if name != "__metadata__")


def model_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json; empty when there is none that can be read."""
    try:
        data = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], data) if isinstance(data, dict) else {}


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size - 8:
            return {}
        try:
            return json.loads(stream.read(length))
        except ValueError:
            return {}
