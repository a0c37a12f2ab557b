"""Images, videos and audio of a row: placeholders in the text become typed parts, and files stay closed until asked for.

With `--multimodal-keys '{"image": "images"}'`, the text `<image>` in a prompt stands for the next entry of the row's
`images`. A message `"Left: <image> right: <image>"` becomes the parts text, image, text, image, where an image part is
`{"type": "image", "image": REFERENCE}`. A reference is JSON-ready: the path of a file, relative ones taken from the data
file's folder; a `data:` text; or, for bytes in a Parquet file, the place where they stand.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.errors import DataError
from miles.rollout.dataset.tables import Table, open_table
from miles.utils.chat_template_utils import Message, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("image", "video", "audio")
_PLACEHOLDER = re.compile(f"<({'|'.join(KINDS)})>")


def with_media(
    path: str, line: int, number: int, row: Mapping[str, Any], prompt: Prompt, keys: Mapping[str, str]
) -> Prompt:
    """The prompt with typed parts in place of placeholders; unchanged when row and text have none.

    `number` is the row's position in the file from 0. Raises DataError with file and line when the text has another
    number of placeholders of a kind than the row has entries, or an entry is not a reference.
    """
    waiting = {kind: _references(path, line, number, row, kind, key) for kind, key in keys.items()}
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    found = {kind: sum(_count(message.get("content"), kind) for message in messages) for kind in keys}
    for kind, key in keys.items():
        given = len(waiting[kind])
        if found[kind] != given:
            raise DataError(
                path,
                f"the prompt has {found[kind]} <{kind}> and {key!r} has {given}",
                f"write <{kind}> once for each entry of {key!r}",
                line=line,
            )
    if not any(found.values()):
        return prompt
    queues = {kind: iter(references) for kind, references in waiting.items()}
    return [{**message, "content": _parts(message.get("content"), queues)} for message in messages]


def media_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The image, video and audio parts of a prompt, in order."""
    if isinstance(prompt, str):
        return []
    contents = [message.get("content") for message in prompt]
    return [p for c in contents if isinstance(c, list) for p in c if isinstance(p, dict) and p.get("type") in KINDS]


def read_media(reference: str | Mapping[str, Any]) -> bytes:
    """The bytes that a reference stands for; raises DataError when they cannot be had."""
    if isinstance(reference, Mapping):
        return _bytes_of_cell(reference)
    if reference.startswith("data:"):
        head, _, body = reference.partition(",")
        try:
            return base64.b64decode(body, validate=True) if head.endswith(";base64") else body.encode()
        except binascii.Error as error:
            raise DataError(head, f"is not base64: {error}", "write the row anew") from error
    try:
        return Path(reference).read_bytes()
    except OSError as error:
        raise DataError(reference, f"cannot be read: {error.strerror}", "check the path in the row") from error


def open_image(reference: str | Mapping[str, Any]) -> Image:
    """The image that a reference stands for, decoded; raises DataError when it is none."""
    import io

    from PIL import Image, UnidentifiedImageError

    data = read_media(reference)
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(str(reference)[:200], f"is not an image: {error}", "write the file anew") from error
    return image


def _references(path: str, line: int, number: int, row: Mapping[str, Any], kind: str, key: str) -> list[Any]:
    value = row.get(key)
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return [
        _reference(path, line, entry, {"file": path, "row": number, "key": key, "item": item}, kind)
        for item, entry in enumerate(entries)
    ]


def _reference(path: str, line: int, entry: Any, place: dict[str, Any], kind: str) -> Any:
    if isinstance(entry, bytes):
        return place
    if isinstance(entry, dict):  # the way in which image columns of Hugging Face datasets are stored
        if isinstance(entry.get("bytes"), bytes):
            return place
        entry = entry.get("path")
    if not isinstance(entry, str) or not entry:
        raise DataError(
            path,
            f"{place['key']!r} holds {type(entry).__name__} at position {place['item']}, not a reference to a {kind}",
            "give the path of a file, a data: text, or bytes",
            line=line,
        )
    if re.match(r"https?://", entry):
        fix = "fetch it first and give the path: a run downloads nothing"
        raise DataError(path, f"{place['key']!r} holds the address {entry:.80}", fix, line=line)
    return entry if entry.startswith("data:") else str(Path(path).parent / entry)


def _count(content: Any, kind: str) -> int:
    if isinstance(content, str):
        return content.count(f"<{kind}>")
    parts: Sequence[Any] = content if isinstance(content, list) else []
    return sum(
        _count(part.get("text"), kind) if part.get("type") == "text" else _is_open(part, kind)
        for part in parts
        if isinstance(part, dict)
    )


def _is_open(part: Mapping[str, Any], kind: str) -> bool:
    """Whether a typed part names no file of its own yet."""
    return part.get("type") == kind and kind not in part


def _parts(content: Any, queues: Mapping[str, Any]) -> Any:
    if isinstance(content, str):
        return _split(content, queues) if any(f"<{kind}>" in content for kind in queues) else content
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "text":
            parts += _split(part.get("text") or "", queues)
        elif isinstance(part, dict) and part.get("type") in queues and _is_open(part, part["type"]):
            parts.append({**part, part["type"]: next(queues[part["type"]])})
        else:
            parts.append(part)
    return parts


def _split(text: str, queues: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(_PLACEHOLDER.split(text)):
        is_kind = i % 2 == 1
        if is_kind and piece in queues:
            parts.append({"type": piece, piece: next(queues[piece])})
            continue
        piece = f"<{piece}>" if is_kind else piece
        if piece and parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += piece
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


@functools.lru_cache(maxsize=4)
def _table(path: str) -> Table:
    return open_table(path)


def _bytes_of_cell(place: Mapping[str, Any]) -> bytes:
    value = _table(str(place["file"])).row(int(place["row"])).get(str(place["key"]))
    entry = value[int(place["item"])] if isinstance(value, list) else value
    found = entry.get("bytes") if isinstance(entry, dict) else entry
    if not isinstance(found, bytes):
        raise DataError(
            str(place["file"]),
            f"row {place['row'] + 1} no longer holds bytes under {place['key']!r}",
            "restore the file",
        )
    return found
