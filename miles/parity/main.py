"""The verb: let engines and trainers take turns, compare, tell."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from miles.config.resources import engine_backend, parity_bounds
from miles.errors import MilesError
from miles.parity.engines import Sampled, prompts_of, sample_from_engine
from miles.parity.options import HELP, PROG, Comparison, read_options
from miles.parity.report import Pair, pair_of, table
from miles.parity.statistics import MARGIN
from miles.parity.trainer import Scored, score_by_trainer
from miles.utils.verb import run_verb

PACKAGES = ("torch", "transformers", "sglang")


@dataclass(slots=True)
class Measured:
    """What came of each engine and each trainer: results, or the reason why there are none."""

    samples: dict[int, list[Sampled]] = field(default_factory=dict)
    scores: dict[int, dict[int, Scored]] = field(default_factory=dict)
    """By trainer, then by engine."""
    errors: dict[str, str] = field(default_factory=dict)
    """By `engine 0`, `trainer 1`, ..."""


def main(argv: Sequence[str]) -> int:
    """Run `miles parity ...`; returns the exit status."""
    return run_verb(argv, read_options, report, help_text=HELP)


def report(comparison: Comparison) -> int:
    """Measure and tell; 0 when every pair is within its gate."""
    started, prompts = time.monotonic(), prompts_of(comparison)
    with ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix="miles-parity-"))
        stack.callback(shutil.rmtree, work)
        measured = measure(comparison, prompts, work)
        if measured.errors:  # their logs are named in the reasons
            stack.pop_all()
    pairs = pairs_of(comparison, measured)
    ok = all(pair.within for pair in pairs)
    facts = facts_of(comparison, measured) | {"seconds": round(time.monotonic() - started, 1)}
    if comparison.json_path is not None:
        found = {"ok": ok, **facts, "pairs": [pair.as_json() for pair in pairs]}
        comparison.json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{heading(facts)}\n\n{table(pairs)}\n\n{verdict(pairs)}\n")
    return 0 if ok else 1


def measure(comparison: Comparison, prompts: Sequence[Sequence[int]], work: Path) -> Measured:
    """Start every engine, then every trainer, one after the other; what fails is noted, and the others go on."""
    found = Measured()
    full_length = bool(comparison.prompt_lengths)
    for e, engine in enumerate(comparison.engines):
        _progress(f"engine {engine.name}")
        log_path = work / f"engine-{e}.log"
        try:
            job = sample_from_engine(engine.config, prompts, full_length=full_length, log_path=log_path)
            found.samples[e] = asyncio.run(job)
            if not found.samples[e]:
                found.errors[f"engine {e}"] = "every response is empty"
        except MilesError as error:
            found.errors[f"engine {e}"] = str(error)
    sampled = {e: samples for e, samples in found.samples.items() if samples}
    sequences = [s.tokens for samples in sampled.values() for s in samples]
    for t, trainer in enumerate(comparison.trainers if sequences else ()):
        _progress(f"trainer {trainer.name}")
        try:
            folder = work / f"trainer-{t}"
            scored = score_by_trainer(trainer.config, sequences, folder=folder, timeout_s=comparison.timeout_s)
            found.scores[t] = _by_engine(scored, sampled)
        except MilesError as error:
            found.errors[f"trainer {t}"] = str(error)
    return found


def _by_engine(scored: Scored, sampled: dict[int, list[Sampled]]) -> dict[int, Scored]:
    """Scores of the sequences of all engines end to end, each engine's to itself."""
    found: dict[int, Scored] = {}
    first = 0
    for e, samples in sampled.items():
        last = first + len(samples)
        found[e] = Scored(log_probs=scored.log_probs[first:last], device=scored.device)
        first = last
    return found


def pairs_of(comparison: Comparison, measured: Measured) -> list[Pair]:
    """A pair for each engine with each trainer."""
    found: list[Pair] = []
    for (e, t), config in comparison.pairs.items():
        engine, trainer = comparison.engines[e].name, comparison.trainers[t].name
        error = measured.errors.get(f"engine {e}") or measured.errors.get(f"trainer {t}")
        if error is None:
            found.append(pair_of(config, engine, trainer, measured.samples[e], measured.scores[t][e]))
        else:
            found.append(Pair(engine=engine, trainer=trainer, rows={}, gate=parity_bounds(config), error=error))
    return found


def facts_of(comparison: Comparison, measured: Measured) -> dict[str, Any]:
    """Model, engine, device and versions, prompts and responses."""
    config = comparison.engines[0].config
    devices = sorted({s.device for scores in measured.scores.values() for s in scores.values()})
    responses = [len(s.decoded) for samples in measured.samples.values() for s in samples]
    return {
        "model": config.model.hf_checkpoint,
        "engine": engine_backend(config),
        "device": ", ".join(devices),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "temperature": config.rollout.temperature,
        "prompts": comparison.num_prompts,
        "prompt_lengths": list(comparison.prompt_lengths),
        "responses": len(responses),
        "longest_response": max(responses, default=0),
    }


def heading(facts: dict[str, Any]) -> str:
    """What was compared."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lengths = facts["prompt_lengths"]
    kind = f"random prompts of {', '.join(map(str, lengths))} tokens" if lengths else "prompts of the run's data"
    return (
        f"{PROG}: {facts['model']}, {facts['engine']} engine, {facts['device'] or 'nothing scored'}; {versions}\n"
        f"{facts['prompts']} {kind}, responses of up to {facts['longest_response']} tokens at temperature "
        f"{facts['temperature']:g}; {facts['seconds']:g} s"
    )


def verdict(pairs: Sequence[Pair]) -> str:
    """The last line: what is beyond or failed, and the bounds that fit all pairs."""
    bad = [f"engine {p.engine} | trainer {p.trainer}" for p in pairs if not p.within]
    lines = [f"beyond the gate, or failed: {'; '.join(bad)}" if bad else "every pair is within its gate"]
    fitting = [p.bounds for p in pairs if p.bounds is not None]
    if len(fitting) > 1:
        mean, p99 = (max(values) for values in zip(*fitting, strict=True))
        lines.append(f"bounds that fit all, {MARGIN:g} times what was seen: mean {mean:g}, p99 {p99:g}")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _progress(what: str) -> None:
    sys.stderr.write(f"{what} ...\n")
    sys.stderr.flush()
