"""Half a run at a time: generating without a trainer, and training on saved samples without engines."""

import asyncio
import json
from dataclasses import replace

import pytest

from miles.core.fakes import fake_run
from miles.errors import CheckpointError
from miles.ray.plain_parts import NothingToPublish, NoTrainer
from tests.ci.register import register_cpu_ci
from tests.fast.ray.conftest import TrainProcess, metrics
from train import train

register_cpu_ci(est_time=45, suite="stage-a-cpu")


async def reward_digits(args, sample, **kwargs):
    return sum(c.isdigit() for c in sample.response) / 6


def test_a_run_without_a_trainer_generates_and_evaluates_every_step_and_publishes_nothing():
    fake = fake_run(2)
    run = replace(fake, trainer=NoTrainer(), weights=NothingToPublish())
    asyncio.run(train(run))
    told = ["eval before"]
    for step in range(2):
        told += [f"rollout {step} with v0", f"commit {step}", f"save? {step}", f"eval? {step}"]
    assert fake.story.events == told
    assert [(step, "perf/train_time" in logged) for step, logged in fake.tracker.logged] == [(0, True), (1, True)]
    assert fake.rollout.ledger.trained == 4


def test_a_run_without_a_trainer_has_nothing_to_save():
    with pytest.raises(CheckpointError, match="no trainer"):
        asyncio.run(NoTrainer().save("checkpoints/iter_0000001"))


def test_a_run_without_engines_keeps_the_version_that_it_was_resumed_with():
    weights = NothingToPublish(7)
    fake = fake_run(1)
    asyncio.run(train(replace(fake, weights=weights)))
    assert weights.version == 7
    assert not any(event.startswith("publish") for event in fake.story.events)


def learned(run):
    """What the trainer reported of each step, without the times."""
    rows = [row for row in metrics(run) if "train/loss" in row]
    return [{k: v for k, v in row.items() if k.startswith("train/")} for row in rows]


def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_saved_samples_are_trained_on_again_to_the_same_losses_without_engines(flags, tmp_path):
    pattern = str(tmp_path / "saved" / "{rollout_id}.jsonl")
    common = [*flags, "--custom-rm-path", "tests.fast.ray.test_debug_runs.reward_digits"]
    first = TrainProcess(*common, "--save-debug-rollout-data", pattern).end()
    assert first.status == 0, first.err
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["0.jsonl", "1.jsonl"]

    replayed = tmp_path / "replayed"
    again = TrainProcess(*common, "--load-debug-rollout-data", pattern, "--run-dir", str(replayed)).end()
    assert again.status == 0, again.err
    assert again.left_behind == []
    assert len(learned(replayed)) == 2
    assert learned(replayed) == learned(tmp_path / "run")
    (started,) = [event for event in events(replayed) if event["event"] == "started"]
    assert sorted(started["pids"]) == ["rollout-manager", "trainer-0"]
    assert not list((replayed / "logs").glob("engine-*"))
    assert not list((replayed / "logs").glob("router*"))


@pytest.mark.slow
def test_generating_alone_starts_no_trainer_and_samples_from_the_given_weights(flags, tmp_path):
    pattern = str(tmp_path / "saved" / "{rollout_id}.jsonl")
    common = [*flags, "--custom-rm-path", "tests.fast.ray.test_debug_runs.reward_digits", "--num-rollout", "1"]
    ended = TrainProcess(*common, "--debug-rollout-only", "--save-debug-rollout-data", pattern).end()
    assert ended.status == 0, ended.err
    assert ended.left_behind == []
    run = tmp_path / "run"
    (row,) = [row for row in metrics(run) if "rollout/reward" in row]
    assert (row["step"], row["rollout/num_samples"], row["rollout/weight_version/max"]) == (0, 16.0, 0.0)
    assert not any("train/loss" in row or "rollout/published_version" in row for row in metrics(run))
    assert not list((run / "logs").glob("trainer-*"))
    assert (tmp_path / "saved" / "0.jsonl").is_file()
