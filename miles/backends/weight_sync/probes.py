"""Probe sequences: fixed token ids that engine and trainer both score after a publish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from miles.backends.training_utils.parity import (
    ParityBounds,
    ParityCause,
    ScoredSequence,
    compare,
    explain,
    hold_against,
)
from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.utils.http_utils import post
from miles.utils.waits import OPEN

PROBE_TOKENS = 32
Score = Callable[[list[list[int]], float], list[list[float]]]


def probe_sequences(count: int, vocab_size: int, max_tokens: int | None) -> list[list[int]]:
    """`count` sequences of random token ids, the same in every process, within a context of `max_tokens` (None: any)."""
    rng = random.Random(20240711)
    length = min(PROBE_TOKENS, max_tokens or PROBE_TOKENS)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


async def score_on_engine(
    engine: EngineEndpoint, sequences: Sequence[Sequence[int]], temperature: float
) -> list[list[float]]:
    """Log-probabilities of tokens 1..T-1 of each sequence, scored by prefill, nothing sampled."""

    async def score(tokens: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": temperature, "top_p": 1.0, "top_k": -1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        with OPEN.on(engine.engine_id, "score probes"):
            answer = await post(f"{engine.url}/generate", body)
        try:
            return prompt_scores(answer["meta_info"]["input_token_logprobs"], tokens)
        except ValueError as error:
            raise EngineError(str(error), engine=engine.engine_id, log_path=engine.log_path) from error

    return list(await asyncio.gather(*(score(s) for s in sequences)))


def prompt_scores(entries: Sequence[Sequence[Any]], tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of tokens 1..T-1 out of `input_token_logprobs` from position 0, whose first entry has none.

    Raises ValueError when the entries are of other tokens than `tokens`, or another one than the first has none.
    """
    if [entry[1] for entry in entries] != list(tokens):
        raise ValueError("the engine scored other tokens than it was sent")
    if missing := [position for position, entry in enumerate(entries) if position and entry[0] is None]:
        raise ValueError(
            f"the engine gave no log-prob for token {missing[0]} of {len(entries)}; only the first has none"
        )
    return [float(entry[0]) for entry in entries[1:]]


def check_probes(
    engine: EngineEndpoint,
    theirs: Sequence[Sequence[float]],
    score: Score,
    sequences: list[list[int]],
    *,
    temperature: float,
    bounds: ParityBounds,
    version: int,
) -> dict[str, float]:
    """Compare the trainer's `score` with `theirs`, the engine's on the same sequences after the publish of `version`.

    Every trainer rank calls it, since `score` is collective. Raises ParityError above the bounds, naming the cause, unless
    they only warn.
    """
    ours = score(sequences, temperature)
    report = compare([x for row in ours for x in row], [x for row in theirs for x in row])

    def find_cause() -> ParityCause:
        scored = [
            ScoredSequence(sample=i, tokens=tokens, engine_R=list(row), mask_R=[True] * len(row))
            for i, (tokens, row) in enumerate(zip(sequences, theirs, strict=True))
        ]
        return explain(scored, score, bounds=bounds, temperature=temperature)

    hold_against(report, bounds, f"probes on {engine.engine_id} after weight version {version}", find_cause)
    return {"parity/probe_mean_diff": report.mean, "parity/probe_p99_diff": report.p99}
