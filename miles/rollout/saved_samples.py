"""The samples of a step on disk, exactly as collected, and the rollout function that gives them to the trainer again.

A file is JSON Lines. The first line says what it is:
`{"format": 1, "kind": "rollout samples", "rollout_id": 3, "groups": 4, "samples": 16}`; each further line is one
sample and its place: `{"at": [group, position], "sample": {...}}`, or `[group, position, part]` where one trajectory
became several samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles.core.samples import Sample
from miles.errors import DataError
from miles.rollout.base_types import RolloutFnEvalInput, RolloutFnTrainInput, RolloutFnTrainOutput, RolloutGroup
from miles.rollout.groups import flatten
from miles.utils.jsonl import read_jsonl
from miles.utils.step_path import step_path

FORMAT = 1
KIND = "rollout samples"


class SavedSamplesRolloutFn:
    """Stands in for the rollout function: each step has the groups that were saved for it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    async def __call__(self, input: RolloutFnTrainInput | RolloutFnEvalInput) -> RolloutFnTrainOutput:
        """The groups saved for the step; raises DataError when its file is missing, cut short or of another step."""
        assert isinstance(input, RolloutFnTrainInput), "a run without engines does not evaluate"
        path = step_path(self._pattern, input.rollout_id)
        return RolloutFnTrainOutput(samples=await asyncio.to_thread(load_groups, path, input.rollout_id))


def save_groups(path: str, step: int, groups: Sequence[RolloutGroup]) -> None:
    """Write the groups of `step`; the file is complete or absent.

    Raises DataError when it cannot be written, or a sample holds what JSON cannot.
    """
    rows = [{"at": place, "sample": sample.to_dict()} for place, sample in _places(groups)]
    header = {"format": FORMAT, "kind": KIND, "rollout_id": step, "groups": len(groups), "samples": len(rows)}
    try:
        lines = [json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in [header, *rows]]
    except (TypeError, ValueError) as e:
        fix = "what hooks put into samples may be only numbers, texts, lists and objects"
        raise DataError(path, f"a sample cannot be saved as JSON: {e}", fix) from e
    file = Path(path)
    draft = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text("".join(lines), encoding="utf-8")
        draft.replace(file)
    except OSError as e:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise DataError(path, f"cannot be written: {e.strerror}", "give --save-debug-rollout-data a free path") from e


def _places(groups: Sequence[RolloutGroup]) -> Iterator[tuple[list[int], Sample]]:
    for g, group in enumerate(groups):
        for i, item in enumerate(group):
            if isinstance(item, Sample):
                yield [g, i], item
            else:
                yield from (([g, i, part], sample) for part, sample in enumerate(flatten(item)))


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as JSON has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r}")


def load_groups(path: str, step: int) -> list[RolloutGroup]:
    """Inverse of `save_groups`; raises DataError with file and line when the file is not what was saved for `step`."""
    lines = read_jsonl(path)
    _, header = next(lines, (0, {}))
    if header.get("kind") != KIND or header.get("format") != FORMAT:
        problem = f"is no file of saved samples in format {FORMAT}: it begins with {json.dumps(header)[:80]}"
        raise DataError(path, problem, "give a file that --save-debug-rollout-data wrote", line=1)
    if header["rollout_id"] != step:
        problem = f"holds the samples of step {header['rollout_id']}, and this is step {step}"
        raise DataError(path, problem, "give every step the file that was saved for it", line=1)
    groups: list[RolloutGroup] = [[] for _ in range(header["groups"])]
    found = 0
    for number, row in lines:
        try:
            _put(groups, row["at"], Sample.from_dict(row["sample"]))
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            problem = f"is no saved sample: {type(e).__name__}: {e}"
            raise DataError(path, problem, "save the samples again with this version", line=number) from e
        found += 1
    if found != header["samples"]:
        problem = f"holds {found} samples, and its first line promises {header['samples']}"
        raise DataError(path, problem, "the file was cut short or edited: save it again")
    return groups


def _put(groups: list[RolloutGroup], place: list[int], sample: Sample) -> None:
    """Append `sample` where it was; lines are in order, so each place is the next of its list."""
    group = groups[place[0]]
    if len(place) == 2:
        group.append(sample)
        return
    if place[2] == 0:
        group.append([])
    group[place[1]].append(sample)
