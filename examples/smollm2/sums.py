"""Sums of two or three digits as prompts: a task that SmolLM2-135M gets right one time in four, and can learn.

Usage: python examples/smollm2/sums.py --out DIR [--rows 8192] [--held-out 256] [--seed 0]

Writes DIR/sums-train.jsonl and DIR/sums-heldout.jsonl. The problems are `chain_sum` of reasoning-gym. Two worked examples
stand before each, so that the form of an answer is known from the start and the arithmetic is what is left to learn. No
problem is in both files; train.jsonl repeats problems, since there are only 200 sums of two digits.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = "4 + 5 = 9\n9 - 2 + 4 = 11\n"
HEADING = "State the final answer to the following arithmetic problem: "
SIZES = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
HELD_OUT_SHARE = 8
"""One problem in so many is never trained on."""
DRAWN_AT_ONCE = 4096


def main(argv: list[str]) -> int:
    """Write both files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8192, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=256, help="different problems held out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out, options.rows, options.held_out, options.seed)
    return 0


def write(folder: Path, rows: int, held_out: int, seed: int) -> None:
    """Both files in `folder`."""
    train, other = split(rows, held_out, seed)
    for name, found in (("sums-train.jsonl", train), ("sums-heldout.jsonl", other)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
        print(f"{folder / name}: {len(found)} rows")


def split(rows: int, held_out: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`rows` rows to train on as they are drawn, and `held_out` different ones that are not among them."""
    train: list[dict[str, Any]] = []
    other: dict[str, dict[str, Any]] = {}
    for problem, answer in problems(seed):
        row = row_of(problem, answer)
        if is_held_out(problem):
            if len(other) < held_out:
                other.setdefault(problem, row)
        elif len(train) < rows:
            train.append(row)
        if len(train) == rows and len(other) == held_out:
            return train, list(other.values())
    raise AssertionError("problems never end")


def problems(seed: int) -> Iterator[tuple[str, str]]:
    """Endless pairs such as `("6 + 8 - 3", "11")`."""
    import reasoning_gym

    while True:
        for item in reasoning_gym.create_dataset("chain_sum", size=DRAWN_AT_ONCE, seed=seed, **SIZES):
            yield item["question"].removeprefix(HEADING).removesuffix("=").strip(), str(item["answer"])
        seed += DRAWN_AT_ONCE


def is_held_out(problem: str) -> bool:
    """Whether a problem is kept from training; always the same ones."""
    return zlib.crc32(problem.encode()) % HELD_OUT_SHARE == 0


def row_of(problem: str, answer: str) -> dict[str, Any]:
    """A prompt that ends where the answer begins, and the answer as label."""
    return {"input": f"{EXAMPLES}{problem} =", "label": answer, "metadata": {"terms": len(problem.split()) // 2 + 1}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
