"""A whole run in bf16 whose checkpoints are written beside it, and its continuation."""

import json

import pytest
from safetensors import safe_open

from miles.utils.checkpoint_folder import complete_iterations
from tests.fast.ray.conftest import TrainProcess, metrics
from tests.fast.ray.test_run import here


def dtypes_of(file):
    with safe_open(file, framework="pt") as stored:
        return {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118


@pytest.mark.slow
def test_a_run_in_bf16_passes_the_gates_saves_beside_training_and_resumes(flags, tmp_path):
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    common = [*flags, "--custom-rm-path", here("reward_digits"), "--bf16", "--sglang-dtype", "bfloat16"]
    common += ["--async-save", "--save-interval", "1", "--parity.interval", "1"]
    first = TrainProcess(*common).end()
    assert first.status == 0, first.err
    assert first.left_behind == []
    rows = metrics(run)
    gates = [r["train/rollout_logprob_abs_diff_mean"] for r in rows if "train/loss" in r]
    probes = [r["parity/probe_mean_diff"] for r in rows if "parity/probe_mean_diff" in r]
    assert len(gates) == 2
    assert len(probes) == 3
    assert all(0 <= difference < 0.03 for difference in gates + probes)
    assert [r["step"] for r in rows if "perf/save_write_time" in r] == [0, 1]
    assert complete_iterations(run / "checkpoints") == [1, 2]
    checkpoint = run / "checkpoints" / "iter_0000002"
    assert dtypes_of(checkpoint / "trainer" / "shards" / "rank_00000.safetensors") == {"F32"}
    assert dtypes_of(checkpoint / "hf" / "model.safetensors") == {"F32"}

    again = [*common, "--num-rollout", "3", "--load", str(run / "checkpoints"), "--run-dir", str(resumed)]
    second = TrainProcess(*again).end()
    assert second.status == 0, second.err
    assert f"resuming from {checkpoint}, after 2 steps" in " ".join(second.out.split())
    steps = [r for r in metrics(resumed) if "train/loss" in r]
    assert [(r["step"], r["train/optimizer_steps"]) for r in steps] == [(2, 6.0)]
    samples = [json.loads(line) for line in (resumed / "rollouts" / "0000002.jsonl").read_text().splitlines()]
    assert sorted({s["group_index"] for s in samples}) == [8, 9, 10, 11]
