"""What two runs left on disk, compared: every function names the first difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.utils import checkpoint_folder
from miles.verify_resume import tensors

TIMING = ("cached_tokens",)
"""Fields of a sample that tell how it was computed, not what."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result: what was compared, how many of it, and the first difference; None when there is none."""

    what: str
    count: int
    unit: str
    difference: str | None = None


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """Where two JSON values differ first, and how; None when they are written alike: 0.0 is not -0.0, and 1 not true."""
    if isinstance(a, dict) and isinstance(b, dict):
        if only := sorted(map(str, a.keys() ^ b.keys())):
            return f"{_join(path, only[0])}: only in one of the two"
        return _first(first_difference(a[key], b[key], _join(path, key)) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        pairs = zip(a, b, strict=False)
        found = _first(first_difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(pairs))
        if found is None and len(a) != len(b):
            return _said(path, f"{len(a)} and {len(b)} entries")
        return found
    return None if _text(a) == _text(b) else _said(path, f"{_short(a)} and {_short(b)}")


def trainer_folders(a: Path, b: Path) -> tuple[int, str | None]:
    """Files of two trainer checkpoints: model, moments, counters, random states. Tensors compared, first difference."""
    names, missing = _files(a, b)
    if missing:
        return 0, f"{missing[0]}: only in one of the two"
    count = 0
    for name in names:
        first, second = a / name, b / name
        if name.endswith(".safetensors"):
            found, difference = tensors.difference(first, second)
            count += found
        elif name.endswith(".json"):
            difference = first_difference(json.loads(first.read_text()), json.loads(second.read_text()))
        else:
            difference = None if first.read_bytes() == second.read_bytes() else "the bytes differ"
        if difference:
            return count, f"{name}: {difference}"
    return count, None


def checkpoints(pairs: Sequence[tuple[Path, Path]]) -> list[Finding]:
    """Checkpoints of the same steps, rising, bit for bit."""
    findings = [
        _over_folders("trainer: model, moments, counters, random states", "tensors", pairs, "trainer"),
        _over_folders("exported model", "tensors", pairs, "hf"),
    ]
    states = [(a.name, checkpoint_folder.read_state(a), checkpoint_folder.read_state(b)) for a, b in pairs]
    for what, pick in STATE_PARTS.items():
        found = _first(_named(name, first_difference(pick(x), pick(y))) for name, x, y in states)
        findings.append(Finding(what, len(states), "checkpoints", found))
    return findings


def _rollout(state: dict[str, Any]) -> dict[str, Any]:
    return state.get("rollout") or {}


STATE_PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "data source: position, buffer": lambda state: _rollout(state).get("data_source"),
    "ledger": lambda state: _rollout(state).get("ledger"),
    "weight version, next step": lambda state: {key: value for key, value in state.items() if key != "rollout"},
}


def samples(pairs: Sequence[tuple[Path, Path]]) -> Finding:
    """Files of `--save-debug-rollout-data`, bit for bit: tokens, log-probs, rewards, weight versions."""
    count = 0
    for a, b in pairs:
        first, second = read_samples(a), read_samples(b)
        count += len(first)
        for x, y in zip(first, second, strict=False):
            found = first_difference(_lasting(x), _lasting(y))
            if found:
                return Finding(SAMPLES, count, "samples", f"step {a.stem}, {_name(x)}: {found}")
        if len(first) != len(second):
            return Finding(SAMPLES, count, "samples", f"step {a.stem}: {len(first)} and {len(second)} samples")
    return Finding(SAMPLES, count, "samples")


SAMPLES = "samples: tokens, log-probs, rewards"


def evaluations(pairs: Sequence[tuple[Path, Path | None]], *, exact: bool) -> Finding:
    """Files of evaluated samples; without `exact` only which samples of which prompts they hold."""
    count = 0
    for a, b in pairs:
        name = f"{a.parent.name}/{a.name}"
        if b is None:
            return Finding(EVALUATIONS, count, "samples", f"{name}: was never evaluated")
        first, second = ([row if exact else _which(row) for row in _lines(file)] for file in (a, b))
        count += len(first)
        if found := first_difference(first, second):
            return Finding(EVALUATIONS, count, "samples", f"{name}: line {found}")
    return Finding(EVALUATIONS, count, "samples")


EVALUATIONS = "evaluations"


def _which(row: dict[str, Any]) -> list[Any]:
    return [row.get(key) for key in ("group_index", "sample_index", "prompt")]


def prompts(pairs: Sequence[tuple[Path, Path]]) -> Finding:
    """Which prompt groups were trained on in each step."""
    count = 0
    for a, b in pairs:
        first, second = (sorted(map(_prompt, read_samples(file))) for file in (a, b))
        count += len({group for group, *_ in first})
        if found := first_difference(first, second):
            return Finding(PROMPTS, count, "groups", f"step {a.stem}: sorted sample {found}")
    return Finding(PROMPTS, count, "groups")


PROMPTS = "prompt groups of each step"


def accounts(files: Sequence[Path], ledger: dict[str, Any], trained_before: int) -> Finding:
    """Samples and ledger of one run agree: no group trained on twice, and as many as the ledger counts."""
    seen: dict[Any, str] = {}
    for file in files:
        groups = {row["sample"]["group_index"] for row in read_samples(file)} - {None}
        if twice := sorted(groups & seen.keys()):
            where = f"in step {seen[twice[0]]} and in step {file.stem}"
            return Finding(ACCOUNTS, len(seen), "groups", f"group {twice[0]} was trained on {where}")
        seen |= dict.fromkeys(groups, file.stem)
    trained = ledger["trained"] - trained_before
    difference = None if trained == len(seen) else f"the ledger says {trained}, the batches hold {len(seen)}"
    return Finding(ACCOUNTS, len(seen), "groups", difference)


ACCOUNTS = "groups trained on: each once, as the ledger says"


def read_samples(file: Path) -> list[dict[str, Any]]:
    """Lines of a file of `--save-debug-rollout-data` without the first."""
    return _lines(file)[1:]


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def _prompt(row: dict[str, Any]) -> tuple[Any, ...]:
    sample = row["sample"]
    length = len(sample["tokens"]) - sample["response_length"]
    return sample["group_index"], sample["index"], sample["tokens"][:length]


def _lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "sample": {key: value for key, value in row["sample"].items() if key not in TIMING}}


def _name(row: dict[str, Any]) -> str:
    return f"sample {row['sample'].get('index')} (group {row['sample'].get('group_index')})"


def _over_folders(what: str, unit: str, pairs: Sequence[tuple[Path, Path]], folder: str) -> Finding:
    count = 0
    for a, b in pairs:
        found, difference = trainer_folders(a / folder, b / folder)
        count += found
        if difference:
            return Finding(what, count, unit, f"{a.name}/{folder}/{difference}")
    return Finding(what, count, unit)


def _files(a: Path, b: Path) -> tuple[list[str], list[str]]:
    """Files that both folders have, and those that only one has."""
    first, second = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (a, b))
    return sorted(first & second), sorted(first ^ second)


def _first(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def _named(name: str, difference: str | None) -> str | None:
    return difference and f"{name}: {difference}"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _said(path: str, difference: str) -> str:
    return f"{path}: {difference}" if path else difference


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
