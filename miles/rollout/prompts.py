"""Prompts of data files: rendered, tokenised and filtered by length, in exactly the way in which they are generated for."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from miles.errors import DataError
from miles.rollout.dataset.media import media_of
from miles.rollout.dataset.rows import PromptFormat, PromptRow, prompt_row, read_row, tools_of
from miles.rollout.dataset.tables import Part, open_part
from miles.utils.chat_template_utils import Message, encode_texts, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """The rows of a file, in its order."""

    path: str
    rows: list[PromptRow]
    num_dropped: int
    """Rows left out because their prompt is longer than `max_prompt_len`."""
    size: int
    digest: str
    """Bytes of the file, and its `dataset.fingerprint`."""


def load_prompts(path: str, format: PromptFormat, tokenizer: PreTrainedTokenizerBase | None) -> PromptFile:
    """All rows of `path`, a JSONL or Parquet file, at once; `FILE@[a:b]` takes rows a to b as a Python slice does.

    Without a tokenizer the prompts stay as the file has them, messages included, and no length is checked.

    Raises DataError with file and line for the first row that is unusable, and for a file without rows.
    """
    part = open_part(path)
    rows = [read_row(part, number, format) for number in range(len(part))]
    kept = rows
    if tokenizer is not None:
        kept = [row for row in prepare(rows, format, tokenizer) if row is not None]
    if not kept:
        raise all_too_long(part.name, len(rows), format)
    if len(kept) < len(rows):
        logger.warning(
            "%s: dropped %d of %d prompts that have more than %d tokens (--rollout-max-prompt-len)",
            part.name,
            len(rows) - len(kept),
            len(rows),
            format.max_prompt_len,
        )
    table = part.table
    return PromptFile(path=path, rows=kept, num_dropped=len(rows) - len(kept), size=table.size, digest=table.digest)


def all_too_long(path: str, count: int, format: PromptFormat) -> DataError:
    """The error of data of which nothing is left."""
    problem = f"all {count} prompts have more than {format.max_prompt_len} tokens"
    return DataError(path, problem, "raise --rollout-max-prompt-len")


def prepare(
    rows: Sequence[PromptRow], format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> list[PromptRow | None]:
    """Rows with their ids, and with text in place of messages where `--apply-chat-template` asks for it.

    A prompt with images stays a list of messages, since a processor needs them. None stands for a row with more than
    `max_prompt_len` tokens. Raises DataError with file and line when a prompt cannot be rendered or tokenised, or
    leaves no room for a response.
    """
    texts: list[str] = []
    rendered: list[bool] = []
    for row in rows:
        texts.append(text_of(row, format, tokenizer))
        rendered.append(_is_rendered(row, format))
    ids: dict[int, list[int]] = {}
    for kind in (False, True):
        chosen = [i for i, is_rendered in enumerate(rendered) if is_rendered is kind]
        try:
            encoded = encode_texts(tokenizer, [texts[i] for i in chosen], rendered=kind)
        except Exception as error:
            raise _refused([(rows[i], texts[i]) for i in chosen], kind, tokenizer) or error from error
        ids.update(zip(chosen, encoded, strict=True))
    return [
        _prepared(row, texts[i], ids[i], format) if fits(row, len(ids[i]), format) else None
        for i, row in enumerate(rows)
    ]


def count_fitting(rows: Iterable[PromptRow], format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that the length filter keeps; holds a thousand at a time."""
    kept, batch = 0, list[PromptRow]()
    for row in rows:
        batch.append(row)
        if len(batch) == 1000:
            kept += sum(found is not None for found in prepare(batch, format, tokenizer))
            batch = []
    return kept + sum(found is not None for found in prepare(batch, format, tokenizer))


def _prepared(row: PromptRow, text: str, ids: list[int], format: PromptFormat) -> PromptRow:
    as_text = format.apply_chat_template and not media_of(row.prompt)
    return replace(row, prompt=text if as_text else row.prompt, tokens=array("i", ids))


def _refused(
    rows: Sequence[tuple[PromptRow, str]], rendered: bool, tokenizer: PreTrainedTokenizerBase
) -> DataError | None:
    """The error of the first row that the tokenizer cannot encode, such as one with a character it does not know."""
    for row, text in rows:
        try:
            encode_texts(tokenizer, [text], rendered=rendered)
        except Exception as error:  # noqa: BLE001 - tokenizers raises the bare class
            problem = f"the tokenizer refuses the prompt {text!r:.80}: {error}"
            return DataError(
                row.path, problem, "mend the row, or use a tokenizer that knows its characters", line=row.line
            )
    return None


def text_of(row: PromptRow, format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that a model gets of a row; raises DataError when the chat template refuses it."""
    return _render(row, format, tokenizer) if _is_rendered(row, format) else str(row.prompt)


def _is_rendered(row: PromptRow, format: PromptFormat) -> bool:
    return format.apply_chat_template or not isinstance(row.prompt, str)


def _render(row: PromptRow, format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    messages: list[Message] = (
        [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
    )
    try:
        return render(tokenizer, messages, format.template_kwargs, row.tools)
    except ValueError as error:
        fix = "mend the row, or use another template: --chat-template-path FILE.jinja"
        raise DataError(row.path, str(error), fix, line=row.line) from error


def fits(row: PromptRow, length: int, format: PromptFormat) -> bool:
    """Whether the length filter keeps a prompt of `length` tokens; raises DataError when it leaves no room for a response."""
    if length == 0:
        raise DataError(row.path, "the prompt has no tokens", "remove the row, or give it text", line=row.line)
    if format.max_prompt_len is not None and length > format.max_prompt_len:
        return False
    context = format.max_context_len
    if context is not None and length >= context:
        raise DataError(
            row.path,
            f"the prompt has {length} tokens, and the context of {context} leaves no room for a response",
            f"drop such prompts with --rollout-max-prompt-len {context - 1} or less, or raise "
            "--rollout-max-context-len if the model allows it",
            line=row.line,
        )
    return True


__all__ = [
    "Part",
    "PromptFile",
    "PromptFormat",
    "PromptRow",
    "all_too_long",
    "count_fitting",
    "fits",
    "load_prompts",
    "open_part",
    "prepare",
    "prompt_row",
    "read_row",
    "text_of",
    "tools_of",
]
