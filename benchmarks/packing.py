"""How full micro-batches are, how long the plan takes, and how even the work of ranks is.

Usage: python benchmarks/packing.py [--json OUT]

8,192 samples, a budget of 16,384 tokens, 8 data-parallel ranks, seed 0. `slots` are the micro-batches of all ranks times the
budget, after their number was made equal on all ranks. `best` is the share that no packing could exceed: fewer bins would
not hold the tokens, nor the samples of which no two fit into one bin, nor those of which no three do. `even` is the mean of ranks' work over the
largest, counted where ranks wait for each other: in every micro-batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from miles.backends.training_utils.schedule import SequenceFlops, StepPlan, plan_steps

SAMPLES, BUDGET, RANKS, SEED = 8192, 16384, 8, 0
FLOPS = SequenceFlops(linear=2 * 1.5e9, quadratic=2 * 28 * 12 * 128)
"""Of a decoder of 1.5 billion parameters."""
Lengths = NDArray[np.int64]


def _uniform(rng: np.random.Generator) -> Lengths:
    return rng.integers(64, 8193, SAMPLES)


def _log_normal(rng: np.random.Generator) -> Lengths:
    return np.clip(np.exp(rng.normal(np.log(1500), 0.8, SAMPLES)).astype(np.int64), 1, BUDGET)


def _two_lengths(rng: np.random.Generator) -> Lengths:
    return np.where(rng.random(SAMPLES) < 0.7, 512, 6000)


def _bimodal(rng: np.random.Generator) -> Lengths:
    middle = np.where(rng.random(SAMPLES) < 0.7, 512, 6000)
    return np.clip(rng.normal(middle, 0.25 * middle).astype(np.int64), 16, BUDGET)


SHAPES: dict[str, Callable[[np.random.Generator], Lengths]] = {
    "uniform 64-8192": _uniform,
    "log-normal 1.5k": _log_normal,
    "bimodal 512/6k, spread 25 %": _bimodal,
    "bimodal 512/6k, exactly": _two_lengths,
}


def measure(lengths: Lengths, balance: str) -> dict[str, float]:
    """Shares and seconds of one plan; `balance` is in turn, tokens or flops."""
    costs = {"in turn": None, "tokens": lengths.astype(np.float64), "flops": FLOPS(lengths)}
    started = time.perf_counter()
    (plan,) = plan_steps(
        np.arange(SAMPLES),
        lengths,
        np.ones(SAMPLES, dtype=bool),
        global_batch_size=None,
        num_steps=None,
        world_size=RANKS,
        max_tokens=BUDGET,
        balance_cost_B=costs[balance],
    )
    seconds = time.perf_counter() - started
    slots = sum(len(rank) for rank in plan.micro_batches) * BUDGET
    return {
        "used": int(lengths.sum()) / slots,
        "best": min(1.0, int(lengths.sum()) / (fewest_bins(lengths) * BUDGET)),
        "even_tokens": evenness(plan, lengths.astype(np.float64)),
        "even_flops": evenness(plan, FLOPS(lengths)),
        "seconds": seconds,
    }


def fewest_bins(lengths: Lengths) -> int:
    """No packing needs fewer bins, which are as many on every rank."""
    by_tokens = -(-int(lengths.sum()) // BUDGET)
    by_pairs = int((lengths > BUDGET // 2).sum())
    by_triples = -(-int((lengths > BUDGET // 3).sum()) // 2)
    return -(-max(by_tokens, by_pairs, by_triples) // RANKS) * RANKS


def evenness(plan: StepPlan, cost: NDArray[np.float64]) -> float:
    """Mean work over the largest of each round of micro-batches, weighted by work; 1 is no waiting."""
    work = np.array([[cost[part].sum() for part in rank] for rank in plan.micro_batches])
    return float(work.sum() / (work.max(axis=0).sum() * RANKS))


def main(argv: list[str]) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(argv)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    print(
        f"{'lengths':<28} {'balance':<8} {'used':>7} {'best':>7} {'even tokens':>12} {'even flops':>11} {'seconds':>8}"
    )
    for name, draw in SHAPES.items():
        lengths = draw(np.random.default_rng(SEED))
        for balance in ("in turn", "tokens", "flops"):
            found = measure(lengths, balance)
            figures.setdefault(name, {})[balance] = found
            shares = f"{found['used']:>7.1%} {found['best']:>7.1%} {found['even_tokens']:>12.1%} {found['even_flops']:>11.1%}"
            print(f"{name:<28} {balance:<8} {shares} {found['seconds']:>8.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
