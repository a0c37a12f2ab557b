"""PPO on the quickstart's task: the critic learns, the reward rises, and a checkpoint with a critic goes on."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from examples.quickstart.run import latest_hf
from tests.ci.register import register_cpu_ci

register_cpu_ci(est_time=85, suite="stage-b-cpu", labels=["learning"])

ROOT = Path(__file__).resolve().parents[2]


def run(*command):
    ended = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def column(rows, name):
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_with_a_critic_learns_the_quickstart_and_resumes(tmp_path):
    task, critic = tmp_path / "task", tmp_path / "critic"
    run("examples/quickstart/make_task.py", "--out", task, "--seed", 0)
    model = ["--hf-checkpoint", task / "model", "--prompt-data", task / "sft.jsonl"]
    run("train.py", "recipes/quickstart-sft.yaml", "--run-dir", tmp_path / "sft", *model)
    ppo = [
        "train.py",
        "recipes/quickstart-ppo.yaml",
        "--hf-checkpoint",
        latest_hf(tmp_path / "sft" / "checkpoints"),
        "--prompt-data",
        task / "train.jsonl",
        "--eval-prompt-data",
        "sampled",
        task / "heldout.jsonl",
        "--critic-save",
        critic,
    ]
    run(*ppo, "--run-dir", tmp_path / "ppo")

    rows = metrics_of(tmp_path / "ppo")
    losses, explained = (column(rows, f"train/{name}") for name in ("value_loss", "explained_variance"))
    rewards, evals = column(rows, "rollout/reward"), column(rows, "eval/sampled")
    print(f"value loss {losses}\nexplained variance {explained}\nreward {rewards}\nheld out {evals}")
    assert len(losses) == 24
    assert len(column(rows, "train/pg_loss")) == 22  # two steps were the critic's alone
    assert np.mean(losses[-4:]) < 0.5 * losses[0]
    assert explained[0] == 0
    assert np.mean(explained[-12:]) > 0.03
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.3
    assert evals[0] <= 0.6
    assert evals[-1] >= 0.8
    with safe_open(critic / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("value_head.weight").abs().max() > 0

    load = ["--load", tmp_path / "ppo" / "checkpoints", "--num-rollout", 25]
    run(*ppo, "--run-dir", tmp_path / "more", *load)
    (loss,) = column(metrics_of(tmp_path / "more"), "train/value_loss")
    assert loss < 0.5 * losses[0]
