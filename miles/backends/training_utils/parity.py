"""Do trainer and engine assign the same log-probabilities to the same tokens, and if not, why not?"""

# N compared tokens, R response tokens of one sequence

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from miles.config.resources import BF16_PARITY
from miles.errors import ParityError

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Score = Callable[[list[list[int]], float], list[list[float]]]
"""The trainer's log-probabilities of tokens 1..T-1 of each sequence, at a temperature."""

TEMPERATURES = (1.0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class ParityBounds:
    """Largest mean and 99th percentile of |trainer - engine| that pass, in nats."""

    mean: float
    p99: float
    warn: bool = False
    """Tell a difference beyond them and go on: rounding alone can choose other experts, and no bound separates that from a fault."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How far trainer and engine are apart: |difference| of log-probabilities in nats over `count` tokens."""

    mean: float
    p99: float
    max: float
    count: int
    worst_sample: int
    """Number of the sample with the largest difference; -1 when nothing was compared."""

    def within(self, bounds: ParityBounds) -> bool:
        """Neither bound is exceeded; a difference that is not a number is never within."""
        return self.mean <= bounds.mean and self.p99 <= bounds.p99

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.3g}, p99 {self.p99:.3g}, max {self.max:.3g} over {self.count} tokens, "
            f"worst in sample {self.worst_sample}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """One sequence with the engine's log-probabilities of its last R tokens."""

    sample: int
    """Number of the sample, for messages."""
    tokens: list[int]
    engine_R: list[float]
    mask_R: list[bool]
    """Tokens to compare."""


@dataclass(frozen=True, slots=True)
class ParityCause:
    """The hypothesis that explains a difference: temperature, top-p, tokens, weights or dtype."""

    name: str
    evidence: str
    fix: str


def compare(trainer_N: ArrayLike, engine_N: ArrayLike, sample_N: ArrayLike | None = None) -> ParityReport:
    """Compare log-probabilities of the same tokens; `sample_N` says which sample each belongs to.

    Raises ValueError when the two differ in length.
    """
    trainer, engine = np.asarray(trainer_N, dtype=np.float64), np.asarray(engine_N, dtype=np.float64)
    if trainer.shape != engine.shape:
        raise ValueError(f"{trainer.size} log-probs of the trainer but {engine.size} of the engine")
    if not trainer.size:
        return ParityReport(0.0, 0.0, 0.0, 0, -1)
    diff = np.abs(trainer - engine)
    worst = int(np.argmax(np.where(np.isnan(diff), np.inf, diff)))
    sample = -1 if sample_N is None else int(np.asarray(sample_N)[worst])
    return ParityReport(
        float(diff.mean()), float(np.quantile(diff, 0.99)), float(diff.max()), int(trainer.size), sample
    )


def explain(
    sequences: Sequence[ScoredSequence],
    score: Score,
    *,
    bounds: ParityBounds,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = -1,
    weight_versions: Sequence[str] = (),
    expected_version: str | None = None,
) -> ParityCause:
    """Find the hypothesis that removes the difference between `score` and the engine on a few sequences.

    Tried in this order: log-probs off by one token, another temperature, a cut distribution (top-p, top-k), other weight
    versions, rounding. When none removes it, the weights differ.
    """
    base = _scores(sequences, score, temperature)
    found = _difference(sequences, base)

    for shift in (1, -1):
        shifted = _difference(sequences, base, shift)
        if shifted.count and shifted.within(bounds):
            return ParityCause(
                "tokens",
                f"the engine's log-prob of token t equals the trainer's of token t{shift:+d} (mean {shifted.mean:.2g})",
                "align log-probs with tokens: entry i of rollout_log_probs belongs to response token i",
            )

    other, at_other = _best_temperature(sequences, score, temperature)
    if at_other.within(bounds):
        return ParityCause(
            "temperature",
            f"the engine's log-probs fit temperature {other:.3g} (mean {at_other.mean:.2g}), the trainer divides by "
            f"{temperature:g}",
            "generate and report log-probs at --rollout-temperature; check custom generate functions",
        )

    cut = top_p < 1 or top_k > 0
    if cut and all(
        (np.asarray(s.engine_R)[s.mask_R] >= b[s.mask_R] - bounds.p99).all() for s, b in _pairs(sequences, base)
    ):
        return ParityCause(
            "top-p",
            f"every log-prob of the engine is at least the trainer's: they are of the distribution cut by top-p {top_p:g}, "
            f"top-k {top_k}",
            "sample with --rollout-top-p 1 and --rollout-top-k -1, or report log-probs of the whole distribution",
        )

    versions = sorted(set(weight_versions))
    if len(versions) > 1 or (expected_version is not None and versions not in ([], [expected_version])):
        wanted = "" if expected_version is None else f", the trainer is at {expected_version}"
        return ParityCause(
            "weights",
            f"the tokens were sampled by weight versions {', '.join(versions)}{wanted}",
            "publish before generating, and do not compare tokens of older versions",
        )

    mean, p99 = BF16_PARITY
    if found.mean <= mean and found.p99 <= p99:
        return ParityCause(
            "dtype",
            f"the difference is no larger than bf16 rounding makes (mean {found.mean:.2g}, p99 {found.p99:.2g}), and no "
            "other temperature or alignment removes it",
            f"run engine and trainer in the same dtype, or raise parity.max_mean_diff and parity.max_p99_diff to {mean} and "
            f"{p99}; if the dtypes are the same, the engine's weights are a small update behind",
        )
    return ParityCause(
        "weights",
        f"no other temperature (best {other:.3g}: mean {at_other.mean:.2g}) or alignment removes the difference",
        "the engine does not hold the trainer's weights: look at the last weight update, and whether --hf-checkpoint is the "
        "same folder for both",
    )


def hold_against(
    report: ParityReport, bounds: ParityBounds, where: str, find_cause: Callable[[], ParityCause]
) -> None:
    """Raise ParityError with its cause when a report is beyond the bounds, or tell it where they only warn.

    What is not a number is never only told. `where` says what was compared.
    """
    if report.within(bounds):
        return
    if bounds.warn and math.isfinite(report.mean):
        logger.warning(
            "%s: trainer and engine differ in log-probability: %s; a mixture of experts in bf16 is expected below mean %g, p99 %g"
            " (miles parity shows where from)",
            where,
            report,
            bounds.mean,
            bounds.p99,
        )
        return
    raise parity_error(report, bounds, find_cause(), where)


def parity_error(report: ParityReport, bounds: ParityBounds, cause: ParityCause, where: str) -> ParityError:
    """The error that stops the run; `where` says what was compared."""
    return ParityError(
        f"{where}: trainer and engine differ in log-probability: {report}; bounds are mean {bounds.mean:g}, "
        f"p99 {bounds.p99:g}\n    cause: {cause.name}: {cause.evidence}\n    fix: {cause.fix}"
    )


def _scores(sequences: Sequence[ScoredSequence], score: Score, temperature: float) -> list[Floats]:
    """Log-probs of all tokens of each sequence; NaN for the first, which has none."""
    rows = score([s.tokens for s in sequences], temperature)
    return [np.asarray([math.nan, *row], dtype=np.float64) for row in rows]


def _pairs(sequences: Sequence[ScoredSequence], scores: Sequence[Floats]) -> list[tuple[ScoredSequence, Floats]]:
    return [(s, row[len(row) - len(s.engine_R) :]) for s, row in zip(sequences, scores, strict=True)]


def _difference(sequences: Sequence[ScoredSequence], scores: Sequence[Floats], shift: int = 0) -> ParityReport:
    """Compare entry i of the engine with the trainer's log-prob `shift` tokens later, where both exist."""
    trainer: list[Floats] = []
    engine: list[Floats] = []
    for sequence, row in zip(sequences, scores, strict=True):
        places = len(row) - len(sequence.engine_R) + np.flatnonzero(sequence.mask_R)
        kept = (places + shift >= 1) & (places + shift < len(row))
        trainer.append(row[places[kept] + shift])
        engine.append(np.asarray(sequence.engine_R, dtype=np.float64)[sequence.mask_R][kept])
    return compare(np.concatenate(trainer), np.concatenate(engine))


def _best_temperature(
    sequences: Sequence[ScoredSequence], score: Score, temperature: float
) -> tuple[float, ParityReport]:
    """The temperature at which the trainer comes closest to the engine: a grid, then a golden-section search."""
    tried: dict[float, ParityReport] = {}

    def at(candidate: float) -> float:
        if candidate not in tried:
            tried[candidate] = _difference(sequences, _scores(sequences, score, candidate))
        return tried[candidate].mean

    grid = sorted({*TEMPERATURES, temperature})
    best = min(grid, key=at)
    place = grid.index(best)
    low, high = grid[max(0, place - 1)], grid[min(len(grid) - 1, place + 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(20):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if at(left) <= at(right):
            high = right
        else:
            low = left
    best = min(tried, key=at)
    return best, tried[best]
