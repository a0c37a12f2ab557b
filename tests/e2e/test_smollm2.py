"""Real weights, real tokenizer, real text: three GRPO steps on SmolLM2-135M-Instruct."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.smollm2 import prepare
from tests.ci.register import register_cpu_ci

register_cpu_ci(est_time=125, suite="stage-b-cpu", labels=["learning"])

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_three_grpo_steps_on_a_real_model(tmp_path):
    assert prepare.main(["--out", str(tmp_path), "--rows", "32"]) == 0
    run = tmp_path / "run"
    command = [sys.executable, "train.py", "recipes/smollm2-135m.yaml", "--num-rollout", "3", "--run-dir", str(run)]
    command += ["--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "train.jsonl")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(row["train/rollout_logprob_abs_diff_p99"] < 1e-3 for row in steps)
    assert [row["rollout/published_version"] for row in rows if "rollout/published_version" in row] == [1, 2, 3, 4]
    samples = [
        json.loads(line) for path in sorted((run / "rollouts").iterdir()) for line in path.read_text().splitlines()
    ]
    assert len(samples) == 48
    assert all(s["prompt"].startswith("<|im_start|>system\n") and s["prompt"].endswith("assistant\n") for s in samples)
    assert all(any(c.isalpha() or c.isdigit() for c in s["response"]) for s in samples)
    assert all(s["reward"] in (0.0, 1.0) for s in samples)
