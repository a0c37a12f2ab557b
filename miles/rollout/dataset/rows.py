"""From a row of a data file to a prompt with its label and metadata, before anything is rendered."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from miles.config.nearest import nearest
from miles.errors import DataError
from miles.rollout.dataset.media import with_media
from miles.rollout.dataset.tables import Part
from miles.utils.chat_template_utils import Prompt

LabelProblem = Callable[[Any, dict[str, Any]], str | None]
"""What is wrong with a label or its row's metadata, as a sentence; None when nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How rows become prompts."""

    input_key: str
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str | None = None
    """Key of the tools that the chat template shows: a list, or the JSON text of one; they become metadata["tools"]."""
    multimodal_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """Key of the row's entries by kind, `{"image": "images"}`; see `dataset/media.py`."""
    apply_chat_template: bool = False
    """Turn prompts into the template's text; a string becomes one user message."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_prompt_len: int | None = None
    """Prompts with more tokens are dropped and counted."""
    max_context_len: int | None = None
    """Tokens of prompt and response together; a prompt that leaves no room for a response is an error."""
    label_problem: LabelProblem | None = None
    """Says what is wrong with a label of a row with this metadata, or None; a problem is an error of the row."""

    @classmethod
    def of(cls, args: Any, max_context_len: int | None) -> PromptFormat:
        """The format that the settings of a run describe."""
        return cls(
            input_key=args.input_key,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            tool_key=args.tool_key,
            multimodal_keys=args.multimodal_keys,
            apply_chat_template=args.apply_chat_template,
            template_kwargs=args.apply_chat_template_kwargs,
            max_prompt_len=args.rollout_max_prompt_len,
            max_context_len=max_context_len,
        )

    def checking(self, label_problem: LabelProblem | None) -> PromptFormat:
        """The same format, whose labels are looked at."""
        return replace(self, label_problem=label_problem)

    def limited_to(self, max_prompt_len: int | None) -> PromptFormat:
        """The same format with another limit of the length filter."""
        return replace(self, max_prompt_len=max_prompt_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One usable row."""

    path: str
    line: int
    prompt: Prompt
    tokens: array[int]
    """Ids of the prompt; empty when the rows were read without a tokenizer."""
    label: Any
    metadata: dict[str, Any]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """What the chat template shows as tools."""
        return tools_of(self.metadata)


def tools_of(metadata: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a chat template is given for a row or sample with this metadata; None without any."""
    tools = metadata.get("tools")
    return tools if isinstance(tools, list) and tools else None


def read_row(part: Part, number: int, format: PromptFormat) -> PromptRow:
    """Row `number` of a part; raises DataError with file and line when it is not usable."""
    path, line = part.table.path, part.line(number)
    return prompt_row(path, line, part.table_row(number), part.row(number), format)


def prompt_row(path: str, line: int, number: int, row: dict[str, Any], format: PromptFormat) -> PromptRow:
    """As `read_row`, from the row's object; `number` is its position in the file from 0."""
    prompt = _value(path, line, row, format.input_key, "--input-key")
    if problem := _prompt_problem(prompt):
        raise DataError(
            path,
            f"{format.input_key!r} {problem}",
            'a prompt is a string, or a list of messages {"role": "user", "content": "..."}',
            line=line,
        )
    if format.multimodal_keys:
        prompt = with_media(path, line, number, row, prompt, format.multimodal_keys)
    label = None if format.label_key is None else _value(path, line, row, format.label_key, "--label-key")
    metadata = _metadata(path, line, row, format)
    if format.label_problem is not None and (problem := format.label_problem(label, metadata)):
        fix = "mend or remove the row, name another key with --label-key, or take another --rm-type"
        raise DataError(path, problem, fix, line=line)
    return PromptRow(
        path=path,
        line=line,
        prompt=prompt,
        tokens=array("i"),
        label=label,
        metadata=metadata,
    )


def _metadata(path: str, line: int, row: dict[str, Any], format: PromptFormat) -> dict[str, Any]:
    metadata = row.get(format.metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(
            path,
            f"{format.metadata_key!r} is {type(metadata).__name__}, not an object",
            "make it an object, or name another key with --metadata-key",
            line=line,
        )
    tools = None if format.tool_key is None else row.get(format.tool_key)
    if tools is None:
        return metadata or {}
    return {**(metadata or {}), "tools": _tools(path, line, tools, str(format.tool_key))}


def _tools(path: str, line: int, value: Any, key: str) -> list[Any]:
    fix = "make it a list of tool schemas or the JSON text of one, or name another key with --tool-key"
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise DataError(path, f"{key!r} is text but not JSON: {error}", fix, line=line) from error
    if not isinstance(value, list):
        raise DataError(path, f"{key!r} is {type(value).__name__}, not a list", fix, line=line)
    if wrong := [type(tool).__name__ for tool in value if not isinstance(tool, dict)]:
        raise DataError(path, f"{key!r} holds {wrong[0]}, not an object", fix, line=line)
    return value


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
