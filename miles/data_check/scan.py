"""Reading every row of a file, and counting what is in it."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from miles.core.samples import Sample
from miles.errors import DataError
from miles.rollout.dataset.rows import PromptFormat, PromptRow, prompt_row
from miles.rollout.dataset.tables import Part, open_part
from miles.rollout.prompts import fits, prepare, text_of
from miles.rollout.sft_rollout import SftFormat, supervised_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 1000
EXAMPLES = 3
MOST_PROBLEMS = 1000
"""Problems that are kept with their text; all are counted."""


@dataclass(slots=True)
class Key:
    """A key of the rows."""

    present: int = 0
    types: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class Found:
    """What is in one file."""

    path: str
    rows: int = 0
    keys: dict[str, Key] = field(default_factory=dict[str, Key])
    lengths: array[int] = field(default_factory=lambda: array("i"))
    """Tokens of each prompt that could be rendered, dropped ones too; in fine-tuning, of prompt and answer."""
    dropped: int = 0
    """Prompts that a run would leave out for their length."""
    labels: dict[Any, tuple[int, Any, dict[str, Any]]] = field(default_factory=dict[Any, Any])
    """First line, label and metadata of each distinct label; filled only when labels are to be graded against."""
    label_types: Counter[str] = field(default_factory=Counter[str])
    examples: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Line, and prompt as the model sees it."""
    num_problems: int = 0
    problems: list[str] = field(default_factory=list[str])
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    """Line of each entry of `hashes`."""

    def add_problem(self, error: DataError) -> None:
        """Note a row that a run would refuse."""
        self.num_problems += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(str(error))

    def duplicates(self) -> tuple[int, list[tuple[int, int]]]:
        """Rows whose prompt an earlier row has too, and for some of them both lines."""
        hashes = np.frombuffer(self.hashes, dtype=np.uint64)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[inverse] != np.arange(len(hashes)))
        pairs = [(self.lines[int(first[inverse[i]])], self.lines[int(i)]) for i in again[:EXAMPLES]]
        return len(again), pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How a run reads rows."""

    format: PromptFormat
    tokenizer: PreTrainedTokenizerBase | None
    """None where no model is given: nothing is rendered then, and no length is known."""
    fine_tuning: SftFormat | None = None
    """Set where rows are conversations to train on; the limits of `format` are then those of prompt and answer."""
    keep_labels: bool = False


def scan(path: str, reader: Reader) -> Found:
    """Everything that is in `FILE` or `FILE@[a:b]`; raises DataError when it cannot be read at all."""
    part, found = open_part(path), Found(path)
    batch: list[PromptRow] = []
    for number in range(len(part)):
        found.rows += 1
        row = _read(part, number, reader, found)
        if row is not None:
            batch.append(row)
        if len(batch) == BATCH:
            _measure(batch, reader, found)
            batch = []
    _measure(batch, reader, found)
    return found


def _read(part: Part, number: int, reader: Reader, found: Found) -> PromptRow | None:
    """The row, counted; None when a run would refuse it."""
    try:
        values = part.row(number)
        for name, value in values.items():
            key = found.keys.setdefault(name, Key())
            key.present += 1
            key.types[_type(value)] += 1
        row = prompt_row(part.table.path, part.line(number), part.table_row(number), values, reader.format)
    except DataError as error:
        found.add_problem(error)
        return None
    digest = xxhash.xxh3_64_intdigest(json.dumps([row.prompt, row.tools], sort_keys=True, default=str).encode())
    found.hashes.append(digest)
    found.lines.append(row.line)
    if reader.format.label_key is not None:
        found.label_types[_type(row.label)] += 1
        if reader.keep_labels:
            name = json.dumps([row.label, row.metadata], sort_keys=True, default=str)
            found.labels.setdefault(xxhash.xxh3_64_intdigest(name.encode()), (row.line, row.label, row.metadata))
    return row


def _measure(rows: Sequence[PromptRow], reader: Reader, found: Found) -> None:
    """Render and tokenise rows as a run does."""
    if reader.tokenizer is None:
        for row in rows[: EXAMPLES - len(found.examples)]:
            text = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, ensure_ascii=False)
            found.examples.append((row.line, text))
        return
    try:
        measured = _tokens(rows, reader)
    except DataError:
        if len(rows) == 1:
            raise
        measured = []
        for row in rows:  # one of them is at fault; which?
            try:
                measured += _tokens([row], reader)
            except DataError as error:
                found.add_problem(error)
    for row, ids in measured:
        _count(row, ids, reader, found)


def _tokens(rows: Sequence[PromptRow], reader: Reader) -> list[tuple[PromptRow, Sequence[int]]]:
    assert reader.tokenizer is not None
    if reader.fine_tuning is None:
        unlimited = replace(reader.format, max_prompt_len=None, max_context_len=None)
        return [(row, row.tokens) for row in prepare(rows, unlimited, reader.tokenizer) if row is not None]
    found: list[tuple[PromptRow, Sequence[int]]] = []
    for row in rows:
        sample = Sample(prompt=row.prompt, label=row.label, metadata=row.metadata)
        try:
            found.append((row, supervised_tokens(reader.tokenizer, sample, reader.fine_tuning).token_ids))
        except ValueError as error:
            raise DataError(row.path, str(error), "mend the row, or remove it", line=row.line) from error
    return found


def _count(row: PromptRow, ids: Sequence[int], reader: Reader, found: Found) -> None:
    found.lengths.append(len(ids))
    try:
        kept = _fits(row, len(ids), reader)
    except DataError as error:
        found.add_problem(error)
        return
    found.dropped += not kept
    if kept and len(found.examples) < EXAMPLES and reader.tokenizer is not None:
        found.examples.append((row.line, _seen(row, ids, reader, reader.tokenizer)))


def _seen(row: PromptRow, ids: Sequence[int], reader: Reader, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model sees: the rendered prompt; in fine-tuning, the tokens of the conversation as text."""
    if reader.fine_tuning is None:
        return row.prompt if isinstance(row.prompt, str) else text_of(row, reader.format, tokenizer)
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _fits(row: PromptRow, length: int, reader: Reader) -> bool:
    if reader.fine_tuning is None:
        return fits(row, length, reader.format)
    limit, context = reader.format.max_prompt_len, reader.format.max_context_len
    if limit is None and context is not None and length > context:
        problem = f"prompt and answer have {length} tokens, but the context holds {context}"
        fix = f"shorten the row, or drop and count such rows with --rollout-max-context-len {context}"
        raise DataError(row.path, problem, fix, line=row.line)
    return limit is None or length <= limit


def _type(value: Any) -> str:
    names = {"NoneType": "null", "dict": "object", "list": "list", "str": "text", "bool": "true/false"}
    kind = type(value).__name__
    return {"int": "integer", "float": "number"}.get(kind) or names.get(kind, kind)
