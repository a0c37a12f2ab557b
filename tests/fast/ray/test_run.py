"""Whole runs: real Ray, engine, router, trainer, weight updates, on a tiny model."""

import json
import re
import signal
import socket
import time

import pytest

from tests.ci.register import register_cpu_ci
from tests.fast.ray.conftest import TrainProcess, metrics

register_cpu_ci(est_time=70, suite="stage-a-cpu")


def digits(response: str) -> float:
    """Dense enough that an untrained model gets different rewards."""
    return sum(c.isdigit() for c in response) / 6


async def reward_digits(args, sample, **kwargs):
    return digits(sample.response)


async def reward_that_breaks(args, sample, **kwargs):
    raise KeyError("judge")


async def slow_reward(args, sample, **kwargs):
    time.sleep(0.05)
    return digits(sample.response)


def here(name: str) -> str:
    return f"tests.fast.ray.test_run.{name}"


def test_a_run_learns_evaluates_saves_and_resumes_and_leaves_no_process(task, flags, tmp_path):
    run = tmp_path / "run"
    evals = ["--eval-prompt-data", "held", f"{task / 'heldout.jsonl'}@[0:8]", "--eval-interval", "2"]
    common = [*flags, "--custom-rm-path", here("reward_digits"), *evals, "--save-interval", "2"]
    first = TrainProcess(*common).end()
    assert first.status == 0, first.err
    assert first.left_behind == []
    assert "4 prompts x 4 samples = 16 samples a rollout = 2 optimizer steps x 8 samples" in first.out
    assert re.search(r"step 2/2  reward [\d.]+  len [\d.]+ .*tok/s \d+ .*left 0:00", first.out)

    rows = metrics(run)
    steps = [r for r in rows if "train/loss" in r]
    assert [r["step"] for r in steps] == [0, 1]
    assert [r["train/optimizer_steps"] for r in steps] == [2.0, 4.0]
    assert all(r["train/rollout_logprob_abs_diff_mean"] < 1e-4 for r in steps)
    assert [r["rollout/published_version"] for r in rows if "rollout/published_version" in r] == [1.0, 2.0, 3.0]
    assert [r["step"] for r in rows if "eval/held" in r] == [-1, 1]
    assert [r["rollout/dropped_prompts"] for r in steps] == [0.0, 0.0]
    for name in ("resolved.yaml", "events.jsonl", "curve.png", "tensorboard", "logs/engine-0.log", "logs/router.log"):
        assert (run / name).exists(), name
    samples = [json.loads(line) for line in (run / "rollouts" / "0000001.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    assert {tuple(s["weight_versions"]) for s in samples} == {("2",)}
    checkpoint = run / "checkpoints" / "iter_0000002"
    assert (checkpoint / "COMPLETE").exists()
    assert (checkpoint / "hf" / "model.safetensors").exists()

    resumed = tmp_path / "resumed"
    again = [*common, "--num-rollout", "3", "--load", str(run / "checkpoints"), "--run-dir", str(resumed)]
    second = TrainProcess(*again).end()
    assert second.status == 0, second.err
    rows = [r for r in metrics(resumed) if "train/loss" in r]
    assert [(r["step"], r["train/optimizer_steps"], r["ledger/trained"]) for r in rows] == [(2, 6.0, 8.0)]
    samples = [json.loads(line) for line in (resumed / "rollouts" / "0000002.jsonl").read_text().splitlines()]
    assert sorted({s["group_index"] for s in samples}) == [8, 9, 10, 11]
    assert {tuple(s["weight_versions"]) for s in samples} == {("3",)}  # as if never interrupted


def test_a_reward_that_raises_ends_the_run_with_its_name_and_leaves_no_process(flags):
    ended = TrainProcess(*flags, "--custom-rm-path", here("reward_that_breaks")).end()
    assert ended.status == 1
    assert here("reward_that_breaks") in ended.err
    assert "KeyError" in ended.err
    assert "logs: " in ended.err
    assert "Traceback" not in ended.err
    assert ended.left_behind == []


@pytest.mark.parametrize("how", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_every_process(flags, tmp_path, how):
    train = TrainProcess(
        *flags, "--num-rollout", "1000", "--custom-rm-path", here("slow_reward"), background=how == "SIGTERM"
    )
    for line in train.process.stdout:
        if line.startswith("step"):
            break
    train.process.send_signal(signal.SIGUSR1)
    for line in train.process.stdout:
        if "wait graph" in line:
            break
    train.process.send_signal(getattr(signal, how))
    ended = train.end(timeout_s=60)
    assert ended.status == 130, ended.err
    assert "interrupted" in ended.err
    assert "Traceback" not in ended.err
    assert ended.left_behind == []
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["reason"]) == ("end", "interrupted")


@pytest.mark.parametrize("fault", ["port", pytest.param("row", marks=pytest.mark.slow), "hook"])
def test_what_is_wrong_before_the_first_step_is_told_and_nothing_stays(flags, tmp_path, fault):
    if fault == "port":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            ended = TrainProcess(*flags, "--custom-rm-path", here("reward_digits"), "--router-port", str(port)).end()
        wanted = f"port {port} of 127.0.0.1 is in use"
    elif fault == "row":
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"input": "sort 12=", "label": "12"}\n{"inputs": "sort 21="}\n')
        ended = TrainProcess(*flags, "--custom-rm-path", here("reward_digits"), "--prompt-data", str(bad)).end()
        wanted = f"{bad}:2:"
    else:
        ended = TrainProcess(*flags, "--custom-rm-path", here("rewrad_digits")).end()
        wanted = "reward_digits"
    assert ended.status != 0
    assert wanted in ended.err
    assert "Traceback" not in ended.err
    assert ended.left_behind == []
