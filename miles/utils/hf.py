"""Model folders in Hugging Face format: tokenizer, context length, end-of-sequence ids. No remote code, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.errors import CheckpointError, ConfigError, Issue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def load_tokenizer(folder: str | Path, chat_template_path: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, with the Jinja text of `chat_template_path` in place of its own template if given.

    A folder whose configuration names the generic class is loaded from its `tokenizer.json` as it stands, which
    imports no torch and takes about a second; others go through `AutoTokenizer`.

    Raises CheckpointError when the folder is missing, has no tokenizer, or needs code of its own; ConfigError when
    the template cannot be read.
    """
    folder = _existing(folder)
    present = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{folder}: no tokenizer in this folder (found: {found})\n"
            "    fix: copy tokenizer.json and tokenizer_config.json of the model beside its config.json"
        )
    config = _read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in present else {}
    try:
        if config.get("tokenizer_class") in _GENERIC_CLASSES and "tokenizer.json" in present:
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        else:
            from transformers import AutoTokenizer  # noqa: TID251

            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if "auto_map" in config:
            raise CheckpointError(
                f"{folder}: this tokenizer needs code that comes with the model, which Miles never runs\n"
                "    fix: save it as a tokenizer.json (`PreTrainedTokenizerFast`) and use that folder"
            ) from error
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be loaded: {type(error).__name__}: {error}\n"
            f"    fix: check {', '.join(present)}"
        ) from error
    if chat_template_path is not None:
        tokenizer.chat_template = _read_template(chat_template_path)
    return tokenizer


def context_length(folder: str | Path) -> int | None:
    """Most tokens that the model's positions allow; None when its configuration does not say.

    Raises CheckpointError when there is no `config.json`.
    """
    config = _model_config(folder)
    for section in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(section.get(key), int):
                return section[key]
    return None


def eos_token_ids(folder: str | Path) -> list[int]:
    """Ids that end a response: those of `config.json` and `generation_config.json`, else the tokenizer's; sorted."""
    config = _model_config(folder)
    sources = [config, config.get("text_config") or {}]
    if (generation := _existing(folder) / "generation_config.json").is_file():
        sources.append(_read_json(generation))
    found: list[Any] = [source.get("eos_token_id") for source in sources]
    if all(value is None for value in found):
        found = [load_tokenizer(folder).eos_token_id]
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def special_token_texts(folder: str | Path) -> list[str]:
    """Text of the special tokens that the tokenizer's files declare, longest first; reads JSON only."""
    folder = _existing(folder)
    texts: set[str] = set()
    if (path := folder / "tokenizer.json").is_file():
        texts.update(t["content"] for t in _read_json(path).get("added_tokens", []) if t.get("special"))
    if (path := folder / "tokenizer_config.json").is_file():
        config = _read_json(path)
        texts.update(t["content"] for t in config.get("added_tokens_decoder", {}).values() if t.get("special"))
        for key in ("eos_token", "pad_token", "bos_token"):
            value = config.get(key)
            texts.add(value["content"] if isinstance(value, dict) else value or "")
    return sorted(texts - {""}, key=lambda text: (-len(text), text))


def _model_config(folder: str | Path) -> dict[str, Any]:
    folder = _existing(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no config.json in this folder\n    fix: pass --hf-checkpoint the folder of a model"
        )
    return _read_json(path)


def _existing(folder: str | Path) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder\n    fix: pass --hf-checkpoint a local folder with config.json, weights and "
            "tokenizer; Miles downloads nothing"
        )
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}\n    fix: copy the file anew") from error


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                Issue(
                    "model.chat_template_path", f"{path} cannot be read: {error}", "pass a Jinja file, or leave it out"
                )
            ]
        ) from error
