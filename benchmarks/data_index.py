"""How fast a prompt file is indexed, what a row costs in memory, and when the first sample comes.

Usage: python benchmarks/data_index.py [--mb 1000] [--rows N] [--json OUT]

A JSONL file of about `--mb` MB is written (or of `--rows` rows of about 90 bytes each, for the case of 10 million rows), with
rows of varying length. `index` finds every row; `memory` is what the process grew by; `order` shuffles one epoch; `first
sample` is from opening the file, its hash included, to the first parsed row, in file order and shuffled. The file is in
the page cache, so that the code is measured and not the disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from miles.rollout.dataset.line_index import LineIndex
from miles.rollout.dataset.order import Order
from miles.rollout.dataset.tables import open_part

SEED, TEMPLATES = 0, 4096
SHORT, LONG = (20, 60), (40, 1500)
"""Range of the prompts' characters: with `--rows`, and without."""


def write_file(path: Path, num_bytes: int, rows: int | None) -> int:
    """Write rows of varying length until there are enough bytes or rows; returns the number of rows."""
    rng = np.random.default_rng(SEED)
    low, high = LONG if rows is None else SHORT
    lines = [
        json.dumps({"input": "what is it? " + "x" * int(n), "label": str(int(n)), "metadata": {"id": i}}) + "\n"
        for i, n in enumerate(rng.integers(low, high, TEMPLATES))
    ]
    block = "".join(lines).encode()
    times = max(1, num_bytes // len(block)) if rows is None else rows // TEMPLATES
    with open(path, "wb") as file:
        for _ in range(times):
            file.write(block)
        rest = 0 if rows is None else rows - times * TEMPLATES
        file.write("".join(lines[:rest]).encode())
    return times * TEMPLATES + rest


def measure(path: Path, rows: int) -> dict[str, float]:
    """Times in seconds and memory in bytes a row."""
    size = path.stat().st_size
    process = psutil.Process()
    fd = os.open(path, os.O_RDONLY)
    gc.collect()
    before, started = process.memory_info().rss, time.perf_counter()
    index = LineIndex(str(path), fd)
    assert len(index) == rows
    index_s = time.perf_counter() - started
    index_bytes = process.memory_info().rss - before
    picks = np.random.default_rng(SEED).integers(0, rows, 20_000)
    started = time.perf_counter()
    for row in picks:
        index.read(int(row))
    read_s = time.perf_counter() - started
    del index
    os.close(fd)
    gc.collect()

    started = time.perf_counter()
    part, row = Order([open_part(str(path))], [], None).draw()
    part.row(row)
    first_s = time.perf_counter() - started
    started = time.perf_counter()
    shuffled = Order([open_part(str(path))], [], SEED)
    part, row = shuffled.draw()
    part.row(row)
    first_shuffled_s = time.perf_counter() - started
    return {
        "rows": rows,
        "megabytes": size / 1e6,
        "index_s": index_s,
        "index_mb_per_s": size / 1e6 / index_s,
        "index_bytes_per_row": index_bytes / rows,
        "reads_per_s": len(picks) / read_s,
        "first_sample_s": first_s,
        "first_sample_shuffled_s": first_shuffled_s,
        "peak_rss_mb": process.memory_info().rss / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rows", type=int, help="write so many short rows instead of --mb")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        found = measure(path, write_file(path, options.mb * 1_000_000, options.rows))
    print(f"{found['rows']:,} rows, {found['megabytes']:,.0f} MB")
    print(f"index           {found['index_mb_per_s']:,.0f} MB/s ({found['index_s']:.2f} s)")
    print(f"memory          {found['index_bytes_per_row']:.1f} bytes a row; process {found['peak_rss_mb']:,.0f} MB")
    print(f"random reads    {found['reads_per_s']:,.0f} rows/s")
    print(
        f"first sample    {found['first_sample_s']:.3f} s in file order, {found['first_sample_shuffled_s']:.2f} s shuffled"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
