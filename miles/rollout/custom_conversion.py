"""`--custom-convert-samples-to-train-data-path`: a user's function in place of the conversion to columns."""

# B samples, T tokens of a sample, R its response tokens

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from miles.core.plugins import describe_error
from miles.core.samples import Sample
from miles.core.train_batch import Axis, Column, TrainBatch
from miles.errors import HookError
from miles.rollout.base_types import RolloutGroup
from miles.rollout.groups import flatten
from miles.rollout.train_data_conversion import group_ids, name_of

KNOWN: dict[str, tuple[Axis, str]] = {
    "tokens": ("token", "int64"),
    "loss_mask": ("response", "float32"),
    "rollout_log_probs": ("response", "float32"),
    "reward": ("sample", "float32"),
    "raw_reward": ("sample", "float32"),
    "sample_index": ("sample", "int64"),
    "group_index": ("sample", "int64"),
    "trajectory": ("sample", "int64"),
    "truncated": ("sample", "float32"),
    "weight_version": ("sample", "int64"),
}
"""Columns that plain lists may be given for: axis and data type of each."""
OTHER_NAMES = {
    "loss_masks": "loss_mask",
    "rewards": "reward",
    "sample_indices": "sample_index",
    "rollout_ids": "trajectory",
    "weight_versions": "weight_version",
}
"""Names of the same columns in the train data of other programs."""
_EXAMPLE = (
    'return {"tokens": [[...], ...], "loss_mask": [[...], ...], "reward": [...]}, one row per sample; for other names '
    "return Column.from_rows(rows, axis) of miles.core.train_batch"
)


def convert_by_hook(
    fn: Callable[[list[Sample]], Any], path: str, groups: Sequence[RolloutGroup], *, require_rewards: bool
) -> TrainBatch:
    """The columns that `fn(samples)` returns for the samples of `groups`, as a train batch.

    `tokens` and `loss_mask` are required, and with `require_rewards` `reward`, which is trained on as it is. Columns of
    `KNOWN` may be lists with a row per sample, under the names of `OTHER_NAMES` too; `response_lengths` is compared with
    the masks. Any other column is a `Column` and goes to `TrainBatch.extra`. What tells samples apart (indices,
    trajectory, truncation, weight version) is filled in where it is not returned.

    Raises HookError naming the column and the first sample for which it is wrong.
    """
    samples = [sample for group in groups for sample in flatten(group)]
    try:
        returned = fn(samples)
    except HookError:
        raise
    except Exception as error:
        raise HookError(path, describe_error(error), "mend this function") from error
    if not isinstance(returned, Mapping):
        raise HookError(path, f"returned {type(returned).__name__}", _EXAMPLE)
    found = dict(_named(path, cast("Mapping[Any, Any]", returned)))
    lengths = found.pop("response_lengths", None)
    required = ["tokens", "loss_mask", *(["reward"] if require_rewards else [])]
    if missing := [name for name in required if name not in found]:
        raise HookError(path, f"returned no column {' and '.join(map(repr, missing))}", _EXAMPLE)
    columns = {name: _column(path, name, rows, samples) for name, rows in found.items()}
    known = {name: column for name, column in columns.items() if name in KNOWN}
    extra = {name: column for name, column in columns.items() if name not in KNOWN}
    try:
        batch = TrainBatch(columns={**_identity(groups, samples), **known}, extra=extra)
    except ValueError as error:
        raise HookError(path, str(error), _EXAMPLE) from None
    if lengths is not None and list(lengths) != batch.response_lengths.tolist():
        b = next((b for b, (x, y) in enumerate(zip(lengths, batch.response_lengths, strict=False)) if x != y), 0)
        raise HookError(
            path,
            f"column 'response_lengths' has {list(lengths)[b : b + 1]} for {name_of(samples[b])}, whose loss_mask has "
            f"{int(batch.response_lengths[b])} entries",
            "leave it out, or make both agree",
        )
    return batch


def _named(path: str, returned: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for key, rows in returned.items():
        if not isinstance(key, str):
            raise HookError(path, f"returned a column named {key!r}", "names are text")
        name = OTHER_NAMES.get(key, key)
        if name in seen:
            raise HookError(path, f"returned the column {name!r} under two names", "return it once")
        seen.add(name)
        yield name, rows


def _column(path: str, name: str, rows: Any, samples: list[Sample]) -> Column:
    """The column of one returned entry; raises HookError naming the column and what is wrong with it."""
    if isinstance(rows, Column):
        wanted = KNOWN.get(name)
        if wanted is not None and rows.axis != wanted[0]:
            raise HookError(path, f"column {name!r} has the axis {rows.axis}, not {wanted[0]}", _EXAMPLE)
        column = rows
    else:
        column = _from_list(path, name, rows, samples)
    if len(column) != len(samples):
        raise HookError(path, f"column {name!r} has {len(column)} rows for {len(samples)} samples", _EXAMPLE)
    if isinstance(column.values, np.ndarray) and np.issubdtype(column.values.dtype, np.floating):
        bad = np.flatnonzero(~np.isfinite(column.values.reshape(len(column.values), -1)).all(axis=1))
        if len(bad):
            b = int(np.searchsorted(column.offsets, bad[0], side="right")) - 1
            raise HookError(
                path, f"column {name!r} holds NaN or infinity for {name_of(samples[b])}", "return finite numbers"
            )
    return column


def _from_list(path: str, name: str, rows: Any, samples: list[Sample]) -> Column:
    if name not in KNOWN:
        known = ", ".join(KNOWN)
        raise HookError(
            path,
            f"column {name!r} is {type(rows).__name__}, and it is none of those that may be a list: {known}",
            "return Column.from_rows(rows, axis), so that it is cut and packed along its axis",
        )
    if not isinstance(rows, Sequence | np.ndarray) or isinstance(rows, str | bytes):
        raise HookError(path, f"column {name!r} is {type(rows).__name__}, not a list of rows", _EXAMPLE)
    axis, dtype = KNOWN[name]
    for b, row in enumerate(cast("Sequence[Any]", rows)):
        where = name_of(samples[b]) if b < len(samples) else f"row {b}"
        if isinstance(row, str | bytes) or np.ndim(row) != (0 if axis == "sample" else 1):
            wanted = "a number" if axis == "sample" else "a list of numbers"
            raise HookError(path, f"column {name!r} is {row!r:.60} for {where}, not {wanted}", _EXAMPLE)
        try:
            Column.from_rows([row], axis, dtype)
        except (ValueError, TypeError) as error:
            raise HookError(path, f"column {name!r} is {row!r:.60} for {where}: {error}", _EXAMPLE) from None
    return Column.from_rows(cast("Sequence[Any]", rows), axis, dtype)


def _identity(groups: Sequence[RolloutGroup], samples: list[Sample]) -> dict[str, Column]:
    """What tells the samples apart, from the samples themselves."""
    group_B, trajectory_B = group_ids(groups)
    values: dict[str, list[Any]] = {
        "sample_index": [b if s.index is None else s.index for b, s in enumerate(samples)],
        "group_index": group_B,
        "trajectory": trajectory_B,
        "truncated": [float(s.status is Sample.Status.TRUNCATED) for s in samples],
        "weight_version": [-1 if s.oldest_weight_version is None else s.oldest_weight_version for s in samples],
    }
    return {name: Column.from_rows(rows, *KNOWN[name]) for name, rows in values.items()}
