"""A file of prompts, read, rendered, tokenised and filtered by length."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from miles.config.nearest import nearest
from miles.errors import DataError
from miles.utils.chat_template_utils import Message, Prompt, encode_texts, render
from miles.utils.jsonl import read_jsonl, split_slice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How rows become prompts."""

    input_key: str
    label_key: str | None = None
    metadata_key: str = "metadata"
    apply_chat_template: bool = False
    """Turn prompts into the template's text; a string becomes one user message."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_prompt_len: int | None = None
    """Prompts with more tokens are dropped and counted."""
    max_context_len: int | None = None
    """Tokens of prompt and response together; a prompt that leaves no room for a response is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One usable row."""

    line: int
    prompt: Prompt
    tokens: array[int]
    """Ids of the prompt; empty when the rows were read without a tokenizer."""
    label: Any
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """The rows of a file, in its order."""

    path: str
    rows: list[PromptRow]
    num_dropped: int
    """Rows left out because their prompt is longer than `max_prompt_len`."""
    size: int
    digest: str
    """Bytes of the file, and xxh3-64 of them."""


def load_prompts(path: str, format: PromptFormat, tokenizer: PreTrainedTokenizerBase | None) -> PromptFile:
    """Read `path`, a JSONL file; `FILE@[a:b]` takes rows a to b as a Python slice does.

    Without a tokenizer the prompts stay as the file has them, messages included, and no length is checked.

    Raises DataError with file and line for the first row that is unusable, and for a file without rows.
    """
    file_path, wanted = split_slice(path)
    rows = [_read_row(file_path, line, row, format) for line, row in read_jsonl(file_path)]
    if not rows:
        raise DataError(file_path, "holds no rows", "write one JSON object a line")
    num_rows = len(rows)
    rows = rows[wanted]
    if not rows:
        raise DataError(path, f"takes none of the {num_rows} rows", "widen the slice")
    num_dropped = 0
    if tokenizer is not None:
        kept = list(_tokenise(file_path, rows, format, tokenizer))
        num_dropped = len(rows) - len(kept)
        if not kept:
            raise DataError(
                file_path,
                f"all {num_dropped} prompts have more than {format.max_prompt_len} tokens",
                "raise --rollout-max-prompt-len",
            )
        if num_dropped:
            logger.warning(
                "%s: dropped %d of %d prompts that have more than %d tokens (--rollout-max-prompt-len)",
                file_path,
                num_dropped,
                len(rows),
                format.max_prompt_len,
            )
        rows = kept
    size, digest = _fingerprint(file_path)
    return PromptFile(path=path, rows=rows, num_dropped=num_dropped, size=size, digest=digest)


def _read_row(path: str, line: int, row: dict[str, Any], format: PromptFormat) -> PromptRow:
    prompt = _value(path, line, row, format.input_key, "--input-key")
    if problem := _prompt_problem(prompt):
        raise DataError(
            path,
            f"{format.input_key!r} {problem}",
            'a prompt is a string, or a list of messages {"role": "user", "content": "..."}',
            line=line,
        )
    metadata = row.get(format.metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(
            path,
            f"{format.metadata_key!r} is {type(metadata).__name__}, not an object",
            "make it an object, or name another key with --metadata-key",
            line=line,
        )
    label = None if format.label_key is None else _value(path, line, row, format.label_key, "--label-key")
    return PromptRow(line=line, prompt=prompt, tokens=array("i"), label=label, metadata=metadata or {})


def _value(path: str, line: int, row: dict[str, Any], key: str, flag: str) -> Any:
    if key in row:
        return row[key]
    close = nearest(key, [(known, known) for known in row])
    hint = (
        f"did you mean {flag} {' or '.join(close)}?"
        if close
        else f"give the row its {key!r}, or name one of them with {flag}"
    )
    raise DataError(path, f"the row has no {key!r}, only {', '.join(map(repr, row)) or 'no key'}", hint, line=line)


def _prompt_problem(prompt: Any) -> str | None:
    """What is wrong with a prompt; None when nothing is."""
    if isinstance(prompt, str):
        return None if prompt else "is an empty string"
    if not isinstance(prompt, list):
        return f"is {'null' if prompt is None else type(prompt).__name__}"
    if not prompt:
        return "is an empty list"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"holds {type(message).__name__} at position {number}, not a message"
        if not isinstance(message.get("role"), str):
            return f"holds a message without a role at position {number}"
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"holds a message without content at position {number}"
    return None


def _tokenise(
    path: str, rows: Sequence[PromptRow], format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> Iterator[PromptRow]:
    """Rows with their ids, and with text in place of messages where the template is applied at load."""
    texts: list[str] = []
    rendered: list[bool] = []
    for row in rows:
        is_plain = isinstance(row.prompt, str) and not format.apply_chat_template
        texts.append(row.prompt if is_plain else _render(path, row, format, tokenizer))  # pyright: ignore[reportArgumentType]
        rendered.append(not is_plain)
    ids: dict[int, list[int]] = {}
    for kind in (False, True):
        chosen = [i for i, is_rendered in enumerate(rendered) if is_rendered is kind]
        try:
            encoded = encode_texts(tokenizer, [texts[i] for i in chosen], rendered=kind)
        except Exception as error:
            raise _refused(path, [(rows[i], texts[i]) for i in chosen], kind, tokenizer) or error from error
        ids.update(zip(chosen, encoded, strict=True))
    for i, row in enumerate(rows):
        if _fits(path, row.line, len(ids[i]), format):
            yield PromptRow(
                line=row.line,
                prompt=texts[i] if format.apply_chat_template else row.prompt,
                tokens=array("i", ids[i]),
                label=row.label,
                metadata=row.metadata,
            )


def _refused(
    path: str, rows: Sequence[tuple[PromptRow, str]], rendered: bool, tokenizer: PreTrainedTokenizerBase
) -> DataError | None:
    """The error of the first row that the tokenizer cannot encode, such as one with a character it does not know."""
    for row, text in rows:
        try:
            encode_texts(tokenizer, [text], rendered=rendered)
        except Exception as error:  # noqa: BLE001 - tokenizers raises the bare class
            problem = f"the tokenizer refuses the prompt {text!r:.80}: {error}"
            return DataError(
                path, problem, "mend the row, or use a tokenizer that knows its characters", line=row.line
            )
    return None


def _render(path: str, row: PromptRow, format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    messages: list[Message] = (
        [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
    )
    try:
        return render(tokenizer, messages, format.template_kwargs)
    except ValueError as error:
        raise DataError(path, str(error), "mend the row, or use another template", line=row.line) from error


def _fits(path: str, line: int, length: int, format: PromptFormat) -> bool:
    if length == 0:
        raise DataError(path, "the prompt has no tokens", "remove the row, or give it text", line=line)
    if format.max_prompt_len is not None and length > format.max_prompt_len:
        return False
    context = format.max_context_len
    if context is not None and length >= context:
        raise DataError(
            path,
            f"the prompt has {length} tokens, and the context of {context} leaves no room for a response",
            f"drop such prompts with --rollout-max-prompt-len {context - 1} or less, or raise "
            "--rollout-max-context-len if the model allows it",
            line=line,
        )
    return True


def _fingerprint(path: str) -> tuple[int, str]:
    digest, size = xxhash.xxh3_64(), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
