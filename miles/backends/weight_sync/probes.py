"""Probe sequences: fixed token ids that engine and trainer both score after a publish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from miles.backends.training_utils.parity import ParityBounds, ScoredSequence, compare, explain, parity_error
from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.utils.http_utils import post

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
        answer = await post(f"{engine.url}/generate", body)
        entries = answer["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != list(tokens):
            raise EngineError(
                "scored other tokens than it was sent", engine=engine.engine_id, log_path=engine.log_path
            )
        return [float(entry[0]) for entry in entries[1:]]

    return list(await asyncio.gather(*(score(s) for s in sequences)))


async def check_probes(
    engine: EngineEndpoint,
    score: Score,
    sequences: list[list[int]],
    *,
    temperature: float,
    bounds: ParityBounds,
    version: int,
) -> dict[str, float]:
    """Compare the trainer's `score` with the engine's on probe sequences, after the publish of `version`.

    Every trainer rank calls it, since `score` is collective. Raises ParityError above the bounds, naming the cause.
    """
    theirs = await score_on_engine(engine, sequences, temperature)
    ours = score(sequences, temperature)
    report = compare([x for row in ours for x in row], [x for row in theirs for x in row])
    if not report.within(bounds):
        scored = [
            ScoredSequence(sample=i, tokens=tokens, engine_R=row, mask_R=[True] * len(row))
            for i, (tokens, row) in enumerate(zip(sequences, theirs, strict=True))
        ]
        cause = explain(scored, score, bounds=bounds, temperature=temperature)
        raise parity_error(report, bounds, cause, f"probes on {engine.engine_id} after weight version {version}")
    return {"parity/probe_mean_diff": report.mean, "parity/probe_p99_diff": report.p99}
