"""Prompts in the order in which a run draws them, ready to generate for."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from miles.errors import DataError
from miles.rollout.dataset.order import Order, Place, identity
from miles.rollout.dataset.rows import PromptFormat, PromptRow, read_row
from miles.rollout.dataset.tables import Part, open_part
from miles.rollout.prompts import all_too_long, count_fitting, prepare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_Prepared = tuple[PromptRow | None, list[list[int]]]
"""A row ready to generate for, None when it is too long, and the position behind it."""

CHECKED_BYTES = 64 << 20
"""Files up to this size are read whole when a run starts, so that a bad row shows before anything is trained."""
MOST_AHEAD = 4096
"""Rows that are prepared before they are asked for."""
TEMPLATE_BYTES = 256
"""What a chat template is taken to add at most, when a prompt's bytes are compared with the context."""


class PromptFeed:
    """Draws rows of files, renders and tokenises them, and drops prompts that are too long.

    The position counts rows, dropped ones too, so that it does not depend on the length filter. Rows are read when they
    are drawn. When the feed is made, the first row of every file is looked at, and all rows of files up to 64 MiB.

    While the caller works on what it took, a thread prepares as many prompts again, since tokenising a batch takes a
    second where prompts are long. What was prepared and not taken leaves no trace in the position.

    Raises DataError with file and line for an unusable row, and when an epoch passed without a prompt that fits.
    """

    def __init__(
        self,
        paths: Sequence[str],
        weights: Sequence[float],
        seed: int | None,
        format: PromptFormat,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """`seed` shuffles; None keeps the order of the files. Without `tokenizer` prompts stay as the files have them."""
        self.dropped = 0
        """Rows drawn so far whose prompt was too long."""
        self.name = " ".join(paths)
        """The files, as the user wrote them."""
        self._parts = [open_part(path) for path in paths]
        self._order = Order(self._parts, weights, seed)
        self._seed, self._format, self._tokenizer = seed, format, tokenizer
        self._state = self._order.state()
        self._prepared: deque[_Prepared] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts") if tokenizer else None
        self._ahead: Future[None] | None = None
        for part in self._parts:
            self._check(part)

    def __len__(self) -> int:
        """Draws of an epoch: the rows of all files."""
        self._settle()
        return len(self._order)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and rows of it already drawn."""
        self._settle()
        return self._order.position_of(self._state)

    def state(self) -> list[list[int]]:
        """The position, JSON-ready."""
        return self._state

    def seek(self, state: Sequence[Sequence[int]] | None) -> None:
        """Go on from `state`; None is the first row of epoch 0."""
        self._settle()
        self._prepared.clear()
        self._order.seek(state or self._order.start)
        self._state = self._order.state()

    def take(self, count: int) -> list[PromptRow]:
        """The next `count` prompts that fit; the position stays where it was when an error is raised."""
        before = self._state, self.dropped
        try:
            taken = self._take(count)
        except BaseException:
            self.seek(before[0])
            self.dropped = before[1]
            raise
        if self._thread is not None and count > 0 and len(self._prepared) < count:
            self._ahead = self._thread.submit(self._prepare_ahead, min(count, MOST_AHEAD))
        return taken

    def _take(self, count: int) -> list[PromptRow]:
        taken: list[PromptRow] = []
        dropped_in_a_row = dropped = 0
        self._settle()
        while len(taken) < count:
            if not self._prepared:
                self._prepare(count - len(taken))
            row, self._state = self._prepared.popleft()
            if row is not None:
                taken.append(row)
                dropped_in_a_row = 0
                continue
            dropped, dropped_in_a_row = dropped + 1, dropped_in_a_row + 1
            if dropped_in_a_row >= len(self._order):
                raise all_too_long(self.name, len(self._order), self._format)
        self._note_dropped(dropped)
        return taken

    def _prepare(self, count: int) -> None:
        """Draw `count` rows behind those that are prepared; draws none when one of them is unusable."""
        before = self._order.state()
        places: list[Place] = []
        states: list[list[list[int]]] = []
        try:
            for _ in range(count):
                places.append(self._order.draw())
                states.append(self._order.state())
            rows: Sequence[PromptRow | None] = [read_row(part, number, self._format) for part, number in places]
            if self._tokenizer is not None:
                rows = prepare(_without_none(rows), self._format, self._tokenizer)
        except BaseException:
            self._order.seek(before)
            raise
        self._prepared.extend(zip(rows, states, strict=True))

    def _prepare_ahead(self, count: int) -> None:
        try:
            self._prepare(count)
        except DataError:
            return  # raised when the row's turn comes

    def _settle(self) -> None:
        """Wait for the thread, which draws from the same order."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.result()

    def count_fitting(self) -> int:
        """Prompts of one pass over all files that the length filter keeps; reads and tokenises every row to tell."""
        self._settle()
        if self._tokenizer is None or self._format.max_prompt_len is None:
            return len(self._order)
        rows = (row for part in self._parts for row in _rows(part, self._format))
        fitting = count_fitting(rows, self._format, self._tokenizer)
        if not fitting:
            raise all_too_long(self.name, len(self._order), self._format)
        return fitting

    def identity(self) -> dict[str, Any]:
        """What a position refers to, JSON-ready."""
        self._settle()
        return identity(self._parts, self._order, self._seed)

    def _note_dropped(self, count: int) -> None:
        before, self.dropped = self.dropped, self.dropped + count
        if before.bit_length() != self.dropped.bit_length():  # at 1, 2, 4, 8, ...
            logger.warning(
                "%s: dropped %d prompts so far that have more than %s tokens (--rollout-max-prompt-len)",
                self.name,
                self.dropped,
                self._format.max_prompt_len,
            )

    def _check(self, part: Part) -> None:
        if part.table.size > CHECKED_BYTES:
            read_row(part, 0, self._format)
            return
        suspects = [row for row in _rows(part, self._format) if self._may_fill_context(row)]
        if self._tokenizer is not None:
            for start in range(0, len(suspects), 1000):
                prepare(suspects[start : start + 1000], self._format, self._tokenizer)

    def _may_fill_context(self, row: PromptRow) -> bool:
        """Whether a prompt has so many bytes that, with a token for each, it could leave no room for a response."""
        context, limit = self._format.max_context_len, self._format.max_prompt_len
        if context is None or (limit is not None and limit < context):
            return False
        text = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, ensure_ascii=False, default=str)
        size = len(text.encode("utf-8", "surrogatepass")) + (len(json.dumps(row.tools)) if row.tools else 0)
        return size + TEMPLATE_BYTES >= context


def identity_text(saved: Mapping[str, Any]) -> str:
    """An `identity` in words."""
    files = [
        f"{f.get('path')} ({f.get('size')} bytes, hash {f.get('digest')}, rows {f['rows'][0]} to {f['rows'][1]})"
        for f in saved.get("files", [])
    ]
    weights = f", weights {saved['weights']}" if saved.get("weights") else ""
    order = f"shuffled by seed {saved.get('seed')}" if saved.get("shuffle") else "in the order of the files"
    return f"{' + '.join(files) or 'no files'}{weights}, {order}"


def same_data(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether two identities mean the same rows in the same order, wherever the files are."""
    return _without_paths(saved) == _without_paths(current)


def _without_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, "files": [{k: v for k, v in file.items() if k != "path"} for file in data.get("files", [])]}


def _rows(part: Part, format: PromptFormat) -> Iterator[PromptRow]:
    number = 0
    while part.has(number):
        yield read_row(part, number, format)
        number += 1


def _without_none(rows: Sequence[PromptRow | None]) -> list[PromptRow]:
    return [row for row in rows if row is not None]
