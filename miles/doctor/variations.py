"""The ways in which the batch is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One way to split the same work."""

    name: str
    ranks: int = 1
    parts: int = 1
    """A micro-batch may hold this part of an optimizer step's tokens, but at least the longest sample."""
    shuffled: bool = False
    split: Literal["one", "all"] = "one"
    """Trajectories of two turns that are two samples instead of one."""
    balance: bool = False
    """Share micro-batches out by the operations that they need."""


LEAST = 1_000_000
"""`parts` of micro-batches no larger than the longest sample."""
BASE = Variation(name="whole batch at once, 1 rank")
"""What the others are compared with: each optimizer step is one micro-batch of one rank."""
VARIATIONS = (
    Variation(name="micro-batch size: half", parts=2),
    Variation(name="gradient accumulation", parts=4),
    Variation(name="packing: least per pack", parts=LEAST),
    Variation(name="order of samples", shuffled=True),
    Variation(name="trajectory splitting", split="all"),
    Variation(name="trajectory splitting, torn apart", split="all", parts=LEAST),
    Variation(name="data parallel: 2 ranks", ranks=2, parts=2),
    Variation(name="2 ranks, packs balanced by flops", ranks=2, parts=LEAST, balance=True),
    Variation(name="data parallel: 4 ranks", ranks=4, parts=4),
    Variation(name="4 ranks, everything at once", ranks=4, parts=LEAST, shuffled=True, split="all"),
)
"""Each is a row of the result; those of as many ranks are neighbours."""
