"""Whole runs whose weights go by a process group or through a folder, to two engines and from two trainer ranks."""

import json

import pytest

from tests.fast.ray.conftest import TrainProcess, metrics
from tests.fast.ray.test_run import here


@pytest.mark.parametrize(("transport", "ranks"), [("broadcast", 2), pytest.param("disk", 1, marks=pytest.mark.slow)])
def test_a_run_sends_weights_to_two_engines_and_proves_them(flags, tmp_path, transport, ranks):
    more = ["--rollout-engines", "2", "--train-ranks", str(ranks), "--num-cpus", "4", "--weights.reload-interval", "2"]
    ended = TrainProcess(
        *flags, *more, "--update-weight-transfer-mode", transport, "--custom-rm-path", here("reward_digits")
    ).end()
    assert ended.status == 0, ended.err
    assert ended.left_behind == []
    rows = metrics(tmp_path / "run")
    published = [row for row in rows if "rollout/published_version" in row]
    assert [row["rollout/published_version"] for row in published] == [1.0, 2.0, 3.0]
    assert all(row["perf/verify_weights_time"] > 0 for row in published)
    assert all(r["train/rollout_logprob_abs_diff_mean"] < 1e-4 for r in rows if "train/loss" in r)
    samples = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "0000001.jsonl").read_text().splitlines()]
    assert {tuple(s["weight_versions"]) for s in samples} == {("2",)}
    assert [path.name for path in (tmp_path / "run" / "weights").iterdir()] == [".lock"]
