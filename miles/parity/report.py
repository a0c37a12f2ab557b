"""Every pair of engine and trainer as rows of differences, its verdict, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from miles.config.resources import parity_bounds
from miles.config.schema import RunConfig
from miles.parity.engines import Sampled
from miles.parity.statistics import Difference, difference, recommended
from miles.parity.trainer import Scored

FIRST = 64
"""Response tokens of the first bucket: differences may grow with the position, or with a cache that was quantised."""
DECODE, PREFILL, BETWEEN = "trainer - decode", "trainer - prefill", "prefill - decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One engine with one trainer."""

    engine: str
    trainer: str
    rows: dict[str, Difference]
    """By what is compared, and in which part of the responses."""
    gate: tuple[float, float]
    """Bounds of the run's parity gate, mean and p99."""
    error: str | None = None
    """Why there is nothing to compare."""
    gated: str = DECODE
    """The row that a run's gate would look at."""

    @property
    def within(self) -> bool:
        if self.error is not None:
            return False
        seen = self.rows[self.gated]
        return seen.mean <= self.gate[0] and seen.p99 <= self.gate[1]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds that fit what was seen, mean and p99."""
        if self.error is not None:
            return None
        seen = self.rows[self.gated]
        return recommended(seen.mean), recommended(seen.p99)

    def as_json(self) -> dict[str, Any]:
        """A JSON-ready object with every number."""
        return {
            "engine": self.engine,
            "trainer": self.trainer,
            "error": self.error,
            "rows": {name: asdict(row) for name, row in self.rows.items()},
            "gated": self.gated,
            "gate": {"mean": self.gate[0], "p99": self.gate[1]},
            "within": self.within,
            "recommended": None if self.bounds is None else dict(zip(("mean", "p99"), self.bounds, strict=True)),
        }


def pair_of(config: RunConfig, engine: str, trainer: str, samples: Sequence[Sampled], scored: Scored) -> Pair:
    """Compare what an engine sampled with what a trainer says of the same sequences, in the same order."""
    trained = [row[s.start :] for s, row in zip(samples, scored.log_probs, strict=True)]
    rows = dict(_rows(DECODE, trained, [s.decoded for s in samples]))
    prefilled = [s.prefilled for s in samples if s.prefilled is not None]
    gated = DECODE
    if len(prefilled) == len(samples):
        rows |= _rows(PREFILL, trained, prefilled)
        rows |= list(_rows(BETWEEN, prefilled, [s.decoded for s in samples]))[:1]
        gated = PREFILL if config.rollout.recompute_logprobs_via_prefill else DECODE
    return Pair(engine=engine, trainer=trainer, rows=rows, gate=parity_bounds(config), gated=gated)


def _rows(
    name: str, scored: Sequence[Sequence[float]], sampled: Sequence[Sequence[float]]
) -> Iterator[tuple[str, Difference]]:
    """The difference over all tokens; where some response is longer, over the first ones of each and over the rest too."""
    parts = [(slice(None), "")]
    if any(len(row) > FIRST for row in sampled):
        parts += [(slice(FIRST), f", first {FIRST}"), (slice(FIRST, None), ", rest")]
    for part, label in parts:
        ours, theirs = ([x for row in rows for x in row[part]] for rows in (scored, sampled))
        yield f"{name}{label}", difference(ours, theirs)


def table(pairs: Sequence[Pair]) -> str:
    """A block of lines for each pair; differences in nats."""
    return "\n\n".join("\n".join(_block(pair)) for pair in pairs)


def _block(pair: Pair) -> Iterator[str]:
    yield f"engine {pair.engine} | trainer {pair.trainer}"
    if pair.error is not None:
        yield f"  FAILED: {pair.error}"
        return
    width = max(map(len, pair.rows))
    yield f"  {'':<{width}}   tokens      mean       p50       p99       max   KL (k3)  outside 0.8-1.2"
    for name, row in pair.rows.items():
        numbers = "  ".join(f"{x:8.1e}" for x in (row.mean, row.p50, row.p99, row.max, row.kl))
        yield f"  {name:<{width}}  {row.tokens:>7}  {numbers}  {row.outside:>15.2%}"
    mean, p99 = pair.gate
    verdict = "within" if pair.within else "BEYOND"
    yield f"  {pair.gated}: {verdict} the gate's bounds, mean {mean:g} and p99 {p99:g}"
    assert pair.bounds is not None
    yield f"  bounds that fit: --parity.max-mean-diff {pair.bounds[0]:g} --parity.max-p99-diff {pair.bounds[1]:g}"
