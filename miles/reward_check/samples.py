"""Samples to grade again: of a file of saved samples, or of any JSON Lines with responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from miles.core.samples import Sample
from miles.errors import DataError
from miles.rollout.groups import flatten
from miles.rollout.saved_samples import KIND, load_groups
from miles.utils.jsonl import read_jsonl

_FIX = (
    'give a file that --save-debug-rollout-data wrote, or rows like {"response": "...", "label": "...", "reward": 1.0}'
)


@dataclass(frozen=True, slots=True)
class Saved:
    """A sample without its reward, the reward that the file has for it, and where it stands."""

    sample: Sample
    stored: Any
    """None where the file has none."""
    where: str


def read_saved(path: str) -> list[list[Saved]]:
    """The groups of a file; raises DataError with file and line when it holds something else.

    Rows without `group_index` are groups of one. Rows that share it belong together when they follow one another.
    """
    _, first = next(read_jsonl(path), (0, {}))
    if first.get("kind") == KIND:
        step = first.get("rollout_id")
        if not isinstance(step, int):
            raise DataError(path, f"its first line has no step: {json.dumps(first)[:80]}", _FIX, line=1)
        return [[_of_sample(s) for s in flatten(group)] for group in load_groups(path, step)]
    rows = list(_rows(path))
    if not rows:
        raise DataError(path, "holds no samples", _FIX)
    return [list(group) for _, group in groupby(rows, key=_group_of)]


def _group_of(saved: Saved) -> tuple[Any, ...]:
    index = saved.sample.group_index
    return (saved.where,) if index is None else ("group", index)


def _of_sample(sample: Sample) -> Saved:
    stored, sample.reward = sample.reward, None
    return Saved(sample, stored, f"sample {sample.index} (group {sample.group_index})")


def _rows(path: str) -> Iterator[Saved]:
    for number, row in read_jsonl(path):
        if not isinstance(row.get("response"), str):
            keys = ", ".join(sorted(row)) or "nothing"
            raise DataError(path, f"has no text under `response`; it has {keys}", _FIX, line=number)
        metadata, tokens = row.get("metadata") or {}, row.get("tokens") or []
        if not isinstance(metadata, dict) or not isinstance(tokens, list):
            raise DataError(path, "`metadata` is to be an object, and `tokens` a list", _FIX, line=number)
        index = row.get("index", row.get("sample_index"))
        sample = Sample(
            index=number if index is None else index,
            group_index=row.get("group_index"),
            prompt=row.get("prompt") or "",
            tokens=tokens,
            response=row["response"],
            response_length=row.get("response_length") or 0,
            label=row.get("label"),
            metadata=metadata,
            status=Sample.Status.COMPLETED,
        )
        yield Saved(sample, row.get("reward"), f"line {number}")
