"""Engines that die in runs whose trainer and engines give their memory to each other."""

import os
import signal

import pytest

from tests.ci.register import register_cpu_ci
from tests.fast.ray.test_recovery import Watched

register_cpu_ci(est_time=45, suite="stage-b-cpu")

OFFLOAD = ["--offload-train", "--offload-rollout"]


def order(watched: Watched) -> list[tuple[str, int | None]]:
    names = {"engine died": "died", "engine restarted": "restarted"}
    return [
        (e["phase"], e["step"]) if e["event"] == "phase" else (names[e["event"]], None)
        for e in watched.events()
        if e["event"] in ("phase", *names)
    ]


# The cell: an engine's server killed while it sleeps and the trainer works.
@pytest.mark.slow
def test_an_engine_killed_asleep_starts_again_only_when_the_trainer_has_left(flags):
    watched = Watched(flags, *OFFLOAD)
    watched.wait_for("phase", phase="train", step=1)
    watched.kill("engine-0")
    back = watched.wait_for("engine restarted")
    watched.ends_well(engine_restarts=1)
    assert back["version"] == 3
    story = order(watched)
    assert story.index(("train", 1)) < story.index(("publish", 1)) < story.index(("restarted", None))


# The cell: an engine's server killed while it generates and the trainer is away.
@pytest.mark.slow
def test_an_engine_killed_at_work_gets_its_weights_from_a_trainer_that_was_away(flags):
    watched = Watched(flags, *OFFLOAD)
    watched.wait_for("phase", phase="generate", step=1)
    watched.kill_engine_at_work("engine-0")
    back = watched.wait_for("engine restarted")
    assert back["version"] == 2
    watched.ends_well(engine_restarts=1)


@pytest.mark.slow
def test_beside_an_engine_at_work_another_waits_for_the_next_update(flags):
    watched = Watched(flags, *OFFLOAD, "--rollout-engines", "2", "--num-cpus", "3")
    watched.wait_for("phase", phase="generate", step=1)
    os.kill(watched.pid("engine-1"), signal.SIGSTOP)  # so that the step lasts until the other is back
    watched.kill_engine_at_work("engine-0")
    back = watched.wait_for("engine restarted")
    os.kill(watched.pid("engine-1"), signal.SIGCONT)
    assert back["version"] is None
    watched.ends_well(engine_restarts=1)
