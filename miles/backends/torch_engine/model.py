"""Loading a Hugging Face folder for the engine, with every mistake found before the server says it is ready."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from miles.backends.torch_engine.model_folder import check_folder
from miles.backends.torch_engine.settings import EngineSettings
from miles.errors import EngineError
from miles.utils.hf import load_tokenizer
from miles.utils.model_dtype import model_dtype

_CHANGING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of a supported family, and what the engine needs to know of its folder."""

    hf: Any
    """The transformers module; its parameters are the engine's weights, under their Hugging Face names."""
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    context_length: int
    path: str

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.hf.config.vocab_size


def load_model(settings: EngineSettings) -> LoadedModel:
    """Load weights, tokenizer and end-of-sequence ids from `settings.model_path`.

    Sampling defaults of the folder's generation_config are not read. Raises EngineError for a folder that is missing,
    holds no weights, lacks or adds parameters, or describes a model this engine cannot run exactly.
    """
    folder = Path(settings.model_path)
    config = _read_config(folder)
    context_length = _context_length(config, settings.context_length)
    device = _device(settings.device)
    dtype = model_dtype(folder) if settings.dtype == "auto" else settings.dtype
    hf = _load_weights(folder, config, getattr(torch, dtype), device)
    tokenizer = _load_tokenizer(folder)
    eos = _eos_token_ids(folder, config, tokenizer)
    return LoadedModel(hf, tokenizer, eos, context_length, str(folder))


def _read_config(folder: Path) -> Any:
    check_folder(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _CHANGING_ROPE:
        raise EngineError(
            f"{folder} scales rotary positions by {rope['rope_type']!r}, whose frequencies change with the longest "
            "sequence of a batch, so that cached keys would turn wrong; use linear, yarn or llama3 scaling"
        )
    return config


def _context_length(config: Any, wanted: int | None) -> int:
    longest = int(config.max_position_embeddings)
    if wanted is not None and wanted > longest:
        raise EngineError(
            f"--context-length {wanted} is more than the model's max_position_embeddings {longest}; "
            f"give at most {longest}"
        )
    context = wanted or longest
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if windowed and context > config.sliding_window:
        raise EngineError(
            f"the model attends within a sliding window of {config.sliding_window} tokens, which the torch engine "
            f"does not compute; start it with --context-length {config.sliding_window}"
        )
    return context


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _load_weights(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with the others
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"weights of {folder} could not be loaded: {error}") from error
    hf, info = loaded
    wrong = {
        "missing": sorted(info["missing_keys"]),
        "of another shape": sorted(str(key) for key in info["mismatched_keys"]),
        "unknown": sorted(key for key in info["unexpected_keys"] if not key.endswith("rotary_emb.inv_freq")),
    }
    if any(wrong.values()):
        text = "; ".join(f"{len(keys)} {kind}: {', '.join(keys[:5])}" for kind, keys in wrong.items() if keys)
        raise EngineError(f"the parameters in {folder} do not fit its config.json: {text}")
    if hf.config.tie_word_embeddings:
        _check_tied_head(folder)
    return hf.to(device).eval().requires_grad_(False)


def _check_tied_head(folder: Path) -> None:
    """A folder may tie the head to the embedding and yet hold both; they must then be the same numbers."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if "lm_head.weight" in names:
                found["head"] = file.get_tensor("lm_head.weight")
            if "model.embed_tokens.weight" in names:
                found["embedding"] = file.get_tensor("model.embed_tokens.weight")
    if len(found) == 2 and not torch.equal(found["head"], found["embedding"]):
        raise EngineError(
            f"{folder}/config.json says tie_word_embeddings, but lm_head.weight and model.embed_tokens.weight differ; "
            "set tie_word_embeddings to false, or remove lm_head.weight"
        )


def _load_tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return load_tokenizer(folder)


def _eos_token_ids(folder: Path, config: Any, tokenizer: Any | None) -> frozenset[int]:
    sources: list[Any] = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    ids: set[int] = set()
    for source in sources:
        ids |= set(source if isinstance(source, list) else [] if source is None else [source])
    return frozenset(ids)
