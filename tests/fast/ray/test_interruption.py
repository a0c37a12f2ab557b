"""A signal to the whole process group ends a run as interrupted, whatever of it dies first."""

import asyncio
import json
import os
import signal
import time

import pytest

from miles.errors import ClusterError
from miles.ray.interruption import MOMENT_S, Interruption
from tests.ci.register import register_cpu_ci
from tests.fast.ray.conftest import TrainProcess

register_cpu_ci(est_time=20, suite="stage-a-cpu")
register_cpu_ci(est_time=15, suite="stage-b-cpu")


async def _slow(args, sample, **kwargs):
    await asyncio.sleep(0.2)
    return 1.0 if "1" in sample.response else 0.0


def _wait_for_phase(train: TrainProcess, events, phase: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert train.process.poll() is None, train.end().err
        last = events.read_text().splitlines()[-1:] if events.exists() else []
        if last and last[0].endswith("}") and json.loads(last[0]).get("phase") == phase:
            return
        time.sleep(0.002)
    raise AssertionError(f"the run never came to {phase}")


@pytest.mark.parametrize("phase", [pytest.param("generate", marks=pytest.mark.slow), "train"])
def test_a_signal_to_the_whole_group_interrupts_the_run(flags, tmp_path, phase):
    train = TrainProcess(*flags, "--num-rollout", "1000", "--custom-rm-path", f"{__name__}._slow")
    _wait_for_phase(train, tmp_path / "run" / "events.jsonl", phase)
    os.killpg(train.process.pid, signal.SIGTERM)
    ended = train.end(timeout_s=60)
    assert (ended.status, ended.left_behind) == (130, []), ended.err
    assert "interrupted" in ended.err
    assert "trainer-" not in ended.err


def _ends(told_after_s: float | None, died_after_s: float, monkeypatch) -> BaseException | None:
    now = 100.0
    monkeypatch.setattr("miles.ray.interruption.time.monotonic", lambda: now)

    async def go():
        nonlocal now
        interruption = Interruption()
        async with interruption.around(), interruption.noticed():
            pass
        try:
            async with interruption.around():
                if told_after_s is not None and told_after_s <= died_after_s:
                    now = 100 + told_after_s
                    interruption.tell()
                try:
                    async with interruption.noticed():
                        now = 100 + died_after_s
                        raise ClusterError("trainer-0 has ended")
                finally:
                    if told_after_s is not None and told_after_s > died_after_s:
                        now = 100 + told_after_s
                        interruption.tell()
        except BaseException as error:
            return error

    return asyncio.run(go())


@pytest.mark.parametrize(("told", "died"), [(0, 0.1), (0, 60), (0.1, 0), (MOMENT_S, 0)])
def test_a_death_about_or_after_the_word_to_stop_is_part_of_it(told, died, monkeypatch):
    assert isinstance(_ends(told, died, monkeypatch), asyncio.CancelledError)


@pytest.mark.parametrize(("told", "died"), [(None, 0), (MOMENT_S + 0.1, 0)])
def test_a_death_before_it_keeps_its_own_name(told, died, monkeypatch):
    assert isinstance(_ends(told, died, monkeypatch), ClusterError)
