"""Whole runs: killed and resumed, and twice the same. Real Ray, engine, router and trainer, on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart import make_task
from miles.verify_resume import compare
from tests.ci.register import register_cpu_ci

register_cpu_ci(est_time=150, suite="stage-b-cpu")

ROOT = Path(__file__).resolve().parents[2]


async def reward_digits(args, sample, **kwargs):
    """Dense enough that an untrained model gets different rewards."""
    return sum(c.isdigit() for c in sample.response) / 6


def keep_some(args, group, **kwargs):
    """Keeps about two groups in three, by what was sampled."""
    return sum(sample.tokens[-1] for sample in group) % 3 != 0


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    out = tmp_path_factory.mktemp("task")
    make_task.main(["--out", str(out), "--seed", "1"])
    return out


def common(task):
    """Flags of a run over ten prompts, so that epochs end in the middle of a step."""
    return [
        "--hf-checkpoint", str(task / "model"), "--prompt-data", f"{task / 'train.jsonl'}@[0:10]", "--rollout-shuffle",
        "--label-key", "label", "--custom-rm-path", f"{__name__}.reward_digits", "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2", "--rollout-max-response-len", "6",
        "--lr", "1e-3", "--torch-threads", "1", "--eval-interval", "2",
        "--eval-prompt-data", "held", f"{task / 'heldout.jsonl'}@[0:8]",
    ]  # fmt: skip


SURPLUS = ["--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", f"{__name__}.keep_some"]


def miles(*argv):
    command = [sys.executable, "-m", "miles.cli", *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("mode", "points"),
    [
        (["--deterministic-mode", *SURPLUS], ["0.publish:0.5", "1.save:0.5"]),
        ([], ["1.evaluate:0.3"]),
    ],
    ids=["deterministic", "plain"],
)
def test_a_killed_run_that_is_resumed_is_the_uninterrupted_one(task, tmp_path, mode, points):
    out = tmp_path / "out"
    told = miles("verify-resume", *common(task), *mode, "--steps", "3", "--at", *points, "--out", str(out))
    assert ("bit for bit" in told.splitlines()[-1]) == bool(mode)
    report = json.loads((out / "report.json").read_text())
    assert report["ok"]
    assert [bool(run["killed_in"]) for run in report["runs"]] == [True] * len(points) + [False]
    assert all(found["count"] for found in report["findings"])
    trained = [set(), set()]
    for groups, folders in zip(trained, (["uninterrupted"], ["killed-1", "killed-2", "resumed"]), strict=True):
        for folder in folders:
            for file in (out / folder / "samples").glob("*.jsonl"):
                groups |= {row["sample"]["group_index"] for row in compare.read_samples(file)}
    assert trained[0] == trained[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_deterministic_run_gives_the_same_bits_again(task, tmp_path):
    flags = [*common(task), *SURPLUS, "--deterministic-mode", "--num-rollout", "3", "--save-interval", "3"]
    runs = [tmp_path / "first", tmp_path / "second"]
    for run in runs:
        miles("train", *flags, "--run-dir", str(run))
    names = [sorted(str(f.relative_to(run)) for f in run.glob("rollouts/*") if f.is_file()) for run in runs]
    assert names[0] == names[1] == [f"rollouts/{step:07d}.jsonl" for step in range(3)]
    for name in [*names[0], "eval/held/0000001.jsonl", "eval/held/0000002.jsonl"]:
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes(), name
    checkpoints = [run / "checkpoints" / "iter_0000003" for run in runs]
    found = compare.checkpoints([(checkpoints[0], checkpoints[1])])
    assert [finding.difference for finding in found if finding.difference] == []
    assert all(finding.count for finding in found)
