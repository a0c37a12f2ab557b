"""Whole runs whose processes are killed: what recovers goes on with exact accounts, what does not ends with its name."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.ci.register import register_cpu_ci
from tests.fast.ray.conftest import TrainProcess, metrics
from tests.fast.ray.test_run import here

register_cpu_ci(est_time=55, suite="stage-a-cpu")
register_cpu_ci(est_time=190, suite="stage-b-cpu")

BOTH_ENGINES = ["--rollout-engines", "2", "--num-cpus", "3"]


class Watched:
    """A run whose events are read while it goes on."""

    def __init__(self, flags, *more: str) -> None:
        reward = ["--custom-rm-path", here("reward_digits")]
        self.run = Path(flags[flags.index("--run-dir") + 1])
        self.train = TrainProcess(*flags, *reward, "--num-rollout", "3", *more)

    def events(self) -> list[dict]:
        path = self.run / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for(self, name: str, count: int = 1, **facts) -> dict:
        deadline = time.monotonic() + 120
        while True:
            found = [e for e in self.events() if e["event"] == name and facts.items() <= e.items()]
            if len(found) >= count:
                return found[count - 1]
            assert self.train.process.poll() is None, self.train.end()
            assert time.monotonic() < deadline, self.events()
            time.sleep(0.01)

    def pid(self, name: str) -> int:
        """Process id that `name` has now."""
        pids = dict(self.wait_for("started")["pids"])
        for event in self.events():
            if event["event"] in ("engine restarted", "router restarted"):
                pids[event["name"]] = event["pid"]
                pids[f"{event['name']}-actor"] = event.get("actor_pid")
        return pids[name]

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def kill_engine_at_work(self, name: str) -> None:
        """Kill it with requests in flight, which a process that is stopped does not answer."""
        os.kill(self.pid(name), signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(self.pid(name), signal.SIGKILL)

    def ends_well(self, *, engine_restarts: int = 0, router_restarts: int = 0):
        """Status 0, every prompt trained once with the weights of its step, one version a step."""
        ended = self.train.end(timeout_s=120)
        assert ended.status == 0, ended.err
        assert ended.left_behind == []
        rows = metrics(self.run)
        steps = [r for r in rows if "train/loss" in r]
        assert [r["step"] for r in steps] == [0, 1, 2]
        assert [r["ledger/trained"] for r in steps] == [0.0, 4.0, 8.0]  # counted before the step's own are trained
        assert [r["rollout/published_version"] for r in rows if "rollout/published_version" in r] == [1, 2, 3, 4]
        last = steps[-1]
        assert last["fault_tolerance/engine_restarts"] == engine_restarts
        assert last["fault_tolerance/router_restarts"] == router_restarts
        for step in range(3):
            lines = (self.run / "rollouts" / f"{step:07d}.jsonl").read_text().splitlines()
            samples = [json.loads(line) for line in lines]
            assert sorted(s["sample_index"] for s in samples) == list(range(16 * step, 16 * step + 16))
            assert {v for s in samples for v in s["weight_versions"]} == {str(step + 1)}
        return ended


def test_the_only_engine_is_killed_at_work_and_a_new_one_goes_on_with_the_weights_of_the_step(flags):
    watched = Watched(flags)
    watched.wait_for("phase", phase="generate", step=1)
    watched.kill_engine_at_work("engine-0")
    died = watched.wait_for("engine died")
    assert (died["name"], died["error"]) == ("engine-0", "the engine's process was killed by signal 9")
    back = watched.wait_for("engine restarted")
    assert (back["version"], back["restarts"]) == (2, 1)
    assert back["pid"] != died["pid"]
    ended = watched.ends_well(engine_restarts=1)
    assert re.search(r"engine-0 died and is started again: .* signal 9", ended.out)
    assert re.search(r"engine-0 serves again after [\d.]+ s, with weights 2", ended.out)
    phases = [(e["phase"], e["step"]) for e in watched.events() if e["event"] == "phase"]
    assert phases[:5] == [("publish", None), ("generate", 0), ("train", 0), ("publish", 0), ("generate", 1)]


def test_the_router_is_killed_and_every_request_is_asked_again(flags):
    watched = Watched(flags)
    watched.wait_for("phase", phase="generate", step=1)
    os.kill(watched.pid("engine-0"), signal.SIGSTOP)
    time.sleep(0.3)
    watched.kill("router")
    watched.wait_for("router died")
    os.kill(watched.pid("engine-0"), signal.SIGCONT)
    watched.ends_well(router_restarts=1)


def test_without_fault_tolerance_the_run_ends_with_the_engines_error(flags):
    watched = Watched(flags, "--use-fault-tolerance", "false")
    watched.wait_for("phase", phase="generate", step=1)
    watched.kill_engine_at_work("engine-0")
    ended = watched.train.end(timeout_s=90)
    assert ended.status == 1, ended.err
    assert "Traceback" not in ended.err
    assert re.search(r"engine-0: the engine's process was killed by signal 9(.|\n)*engine-0\.log", ended.err)
    assert ended.left_behind == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine-0", "engine-1-actor"])
def test_with_two_engines_the_other_goes_on(flags, victim):
    watched = Watched(flags, *BOTH_ENGINES)
    watched.wait_for("phase", phase="generate", step=1)
    os.kill(watched.pid("engine-0"), signal.SIGSTOP)
    os.kill(watched.pid("engine-1"), signal.SIGSTOP)
    time.sleep(0.3)
    watched.kill(victim)
    dead = victim.removesuffix("-actor")
    (other,) = {"engine-0", "engine-1"} - {dead}
    died = watched.wait_for("engine died")
    assert died["name"] == dead
    if victim.endswith("actor"):
        assert "EngineActor, process" in died["error"]
    if victim == "engine-0":
        os.kill(watched.pid(other), signal.SIGCONT)  # it does the work of both
        watched.ends_well(engine_restarts=1)
    else:
        watched.wait_for("engine restarted")  # with the weights of the step, while the other is at work
        os.kill(watched.pid(other), signal.SIGCONT)
        watched.ends_well(engine_restarts=1)


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "phase"), [(1, "train"), (1, "publish"), (2, "publish")])
def test_an_engine_that_dies_during_an_update_leaves_no_half_weights(flags, engines, phase):
    watched = Watched(flags, *(BOTH_ENGINES if engines == 2 else []))
    watched.wait_for("phase", phase=phase, step=0)
    if phase == "publish":
        time.sleep(0.1)
    os.kill(watched.pid("engine-0"), signal.SIGSTOP)
    watched.wait_for("phase", phase="publish", step=0)
    time.sleep(0.5)
    watched.kill("engine-0")
    watched.ends_well(engine_restarts=1)


@pytest.mark.slow
def test_the_router_dies_during_an_update_which_is_repeated_whole(flags):
    watched = Watched(flags)
    watched.wait_for("phase", phase="train", step=0)
    os.kill(watched.pid("engine-0"), signal.SIGSTOP)
    watched.wait_for("phase", phase="publish", step=0)
    time.sleep(0.5)
    watched.kill("router")
    watched.wait_for("router died")
    os.kill(watched.pid("engine-0"), signal.SIGCONT)
    watched.wait_for("router restarted")
    watched.ends_well(router_restarts=1)


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_started_again(flags):
    checks = ["--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "1"]
    watched = Watched(flags, *checks)
    watched.wait_for("phase", phase="generate", step=1)
    os.kill(watched.pid("engine-0"), signal.SIGSTOP)
    died = watched.wait_for("engine died")
    assert "failed 3 health checks, GET /health: no answer in 1 s" in died["error"]
    watched.ends_well(engine_restarts=1)


@pytest.mark.slow
def test_an_engine_that_dies_too_often_ends_the_run_with_its_error(flags):
    watched = Watched(flags, "--fault-tolerance.max-restarts", "1")
    watched.wait_for("phase", phase="generate", step=1)
    os.kill(watched.pid("engine-0"), signal.SIGSTOP)
    watched.kill("engine-0")
    again = watched.wait_for("engine restarted")["pid"]
    os.kill(again, signal.SIGKILL)
    ended = watched.train.end(timeout_s=90)
    assert ended.status == 1, ended.err
    assert re.search(r"engine-0: the engine's process was killed by signal 9(.|\n)*engine-0\.log", ended.err)
    assert "Traceback" not in ended.err
    assert ended.left_behind == []


@pytest.mark.slow
def test_without_a_trainer_an_engine_that_died_serves_the_folders_weights_again(flags):
    watched = Watched(flags, "--debug-rollout-only")
    watched.wait_for("phase", phase="generate", step=1)
    watched.kill_engine_at_work("engine-0")
    watched.wait_for("engine restarted")
    ended = watched.train.end()
    assert ended.status == 0, ended.err
    assert [r["step"] for r in metrics(watched.run) if "rollout/reward" in r] == [0, 1, 2]
