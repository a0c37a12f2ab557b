"""How far two sets of log-probabilities of the same tokens are apart, and the bounds that fit."""

# N compared tokens

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

LOWEST_RATIO, HIGHEST_RATIO = 0.8, 1.2
"""Ratios beyond these are what a policy loss with --eps-clip 0.2 would clip."""
MARGIN = 3.0
"""Of a recommended bound over what was observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """|scored - sampled| of log-probabilities, in nats, over `tokens` tokens."""

    tokens: int
    mean: float
    p50: float
    p99: float
    max: float
    kl: float
    """Estimate of KL(sampled || scored) in nats a token: k3 of http://joschu.net/blog/kl-approx.html."""
    outside: float
    """Share of tokens whose ratio scored / sampled is below 0.8 or above 1.2."""


def difference(scored_N: ArrayLike, sampled_N: ArrayLike) -> Difference:
    """Compare log-probs of tokens that the policy of `sampled_N` drew; raises ValueError when there are none to compare."""
    scored, sampled = np.asarray(scored_N, dtype=np.float64), np.asarray(sampled_N, dtype=np.float64)
    if scored.shape != sampled.shape or not scored.size:
        raise ValueError(f"{scored.size} log-probs against {sampled.size}")
    log_ratio = scored - sampled
    ratio, distance = np.exp(log_ratio), np.abs(log_ratio)
    return Difference(
        tokens=int(scored.size),
        mean=float(distance.mean()),
        p50=float(np.quantile(distance, 0.5)),
        p99=float(np.quantile(distance, 0.99)),
        max=float(distance.max()),
        kl=float((np.expm1(log_ratio) - log_ratio).mean()),
        outside=float(((ratio < LOWEST_RATIO) | (ratio > HIGHEST_RATIO)).mean()),
    )


def recommended(observed: float) -> float:
    """A bound for the gate: `MARGIN` times what was observed, rounded up to one digit; 1e-6 at least."""
    wanted = max(MARGIN * observed, 1e-6)
    unit = 10.0 ** math.floor(math.log10(wanted))
    return float(f"{math.ceil(wanted / unit - 1e-9) * unit:.0e}")
