"""What can be seen of a model folder before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path

from miles.errors import EngineError

SUPPORTED = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE"}


def check_folder(folder: Path) -> None:
    """Raise EngineError for a folder that is missing, lacks config or weights, or holds an unsupported family."""
    if not folder.is_dir():
        raise EngineError(f"model folder {folder} does not exist; give --model-path a Hugging Face folder")
    config = folder / "config.json"
    if not config.is_file():
        raise EngineError(f"model folder {folder} has no config.json; it holds {_listing(folder)}")
    try:
        model_type = json.loads(config.read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise EngineError(f"{config} is not a JSON object: {error}") from error
    if model_type not in SUPPORTED:
        raise EngineError(
            f"{folder} holds a model of type {model_type!r}; the torch engine runs {', '.join(SUPPORTED.values())}. "
            "Other families need the sglang engine"
        )
    if not list(folder.glob("*.safetensors")):
        raise EngineError(f"model folder {folder} has no *.safetensors weights; it holds {_listing(folder)}")


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
