"""The quickstart on five seeds: where it starts, where it ends, and how long it takes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ci.register import register_cpu_ci

register_cpu_ci(est_time=275, suite="stage-b-cpu", labels=["learning"])

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_quickstart_learns(tmp_path, seed):
    started_at = time.monotonic()
    command = [sys.executable, "examples/quickstart/run.py", "--seed", str(seed), "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - started_at
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row for row in rows if "eval/sampled" in row]
    print(f"seed {seed}: {first['eval/sampled']:.3f} -> {last['eval/sampled']:.3f}, greedy {last['eval/greedy']:.3f}")
    assert 0.2 <= first["eval/sampled"] <= 0.6
    assert last["eval/sampled"] >= 0.80
    assert last["eval/greedy"] >= 0.90
    assert seconds <= 120
    assert "curve.png" in ended.stdout
