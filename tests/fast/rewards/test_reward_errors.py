import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from miles.core.samples import Sample
from miles.errors import HookError, TrainingError
from miles.rollout.rm_hub.alarms import ConstantRewardAlarm
from miles.rollout.rm_hub.hub import RewardHub

FUNCTIONS = """
import asyncio
import threading
import time

async def fails_on_odd(args, sample):
    if sample.index % 2:
        raise ZeroDivisionError(f"no way with {sample.index}")
    return 1.0

async def group_fails(args, samples):
    raise KeyError("label")

async def blocks(args, sample):
    if sample.index == 0:
        time.sleep(args.block_s)
    await asyncio.sleep(0.01)
    return float(sample.index)

async def hangs(args, sample):
    await asyncio.sleep(600)

threads = []

async def where(args, sample):
    threads.append(threading.current_thread())
    return 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "error_rewards_of_test.py").write_text(FUNCTIONS)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    yield
    patch.undo()


@pytest.fixture
def make_hub():
    hubs = []

    def make_hub(function, **changes):
        values = {
            "rm_type": None,
            "custom_rm_path": f"error_rewards_of_test.{function}",
            "group_rm": False,
            "reward_key": None,
            "eval_reward_key": None,
            "reward_timeout_s": 10.0,
            "max_reward_error_rate": 0.25,
        }
        hubs.append(RewardHub(SimpleNamespace(**(values | changes))))
        return hubs[-1]

    yield make_hub
    for hub in hubs:
        asyncio.run(hub.close())


def sample(index, **fields):
    return Sample(index=index, group_index=index // 2, prompt=f"prompt number {index}", **fields)


def test_errors_are_counted_by_type_and_too_many_of_a_step_stop_it(make_hub):
    hub = make_hub("fails_on_odd")

    async def run():
        with hub.step(8):
            for index in (0, 1, 2, 3):
                if index % 2:
                    with pytest.raises(HookError, match="ZeroDivisionError"):
                        await hub.grade(sample(index))
                else:
                    await hub.grade(sample(index))
            with pytest.raises(TrainingError) as caught:
                await hub.grade(sample(5))
            return str(caught.value)

    text = asyncio.run(run())
    assert "3 of the 8 rewards of this step failed, more than --max-reward-error-rate 0.25 allows" in text
    for index in (1, 3, 5):
        assert f"sample {index}, prompt 'prompt number {index}'" in text
        assert f"no way with {index}" in text
    assert hub.metrics()["rollout/reward_errors/ZeroDivisionError"] == 3


def test_each_step_begins_anew_and_outside_of_steps_errors_are_only_counted(make_hub):
    hub = make_hub("fails_on_odd", max_reward_error_rate=0.5)

    async def run():
        for _ in range(3):
            with hub.step(2), pytest.raises(HookError):
                await hub.grade(sample(1))
        for _ in range(5):
            with pytest.raises(HookError):
                await hub.grade(sample(1))

    asyncio.run(run())
    assert hub.metrics()["rollout/reward_errors/ZeroDivisionError"] == 8


def test_a_rate_of_one_never_stops_and_of_zero_stops_at_once(make_hub):
    async def run(rate):
        hub = make_hub("fails_on_odd", max_reward_error_rate=rate)
        with hub.step(1):
            for _ in range(4):
                await hub.grade(sample(1))

    with pytest.raises(HookError):
        asyncio.run(run(1.0))
    with pytest.raises(TrainingError, match="1 of the 1 rewards"):
        asyncio.run(run(0.0))


def test_a_group_reward_counts_for_each_of_its_samples(make_hub):
    hub = make_hub("group_fails", group_rm=True, max_reward_error_rate=0.2)

    async def run():
        with hub.step(8):
            await hub.grade_group([sample(0), sample(1)])

    with pytest.raises(TrainingError, match="2 of the 8 rewards"):
        asyncio.run(run())
    assert hub.metrics()["rollout/reward_errors/KeyError"] == 2


def test_timeouts_are_a_type_of_their_own(make_hub):
    hub = make_hub("hangs", reward_timeout_s=0.1)
    with pytest.raises(HookError, match=r"took longer than 0\.1 s on sample 0"):
        asyncio.run(hub.grade(sample(0)))
    assert hub.metrics()["rollout/reward_errors/timeout"] == 1
    assert hub.metrics()["rollout/reward_timeouts"] == 1


def test_a_coroutine_that_blocks_does_not_stop_the_callers_loop_and_is_named(make_hub):
    hub = make_hub("blocks", reward_timeout_s=0.3, block_s=3.0)

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        with pytest.raises(HookError) as caught:
            await hub.grade(sample(0))
        ticking.cancel()
        start = time.monotonic()
        after = [await hub.grade(sample(index)) for index in (1, 2)]
        return str(caught.value), after, time.monotonic() - start, ticks

    text, after, seconds, ticks = asyncio.run(run())
    assert "took longer than 0.3 s on sample 0 (group 0)" in text
    assert "error_rewards_of_test.py" in text
    assert "in blocks blocks the event loop of the rewards" in text
    assert after == [1.0, 2.0]
    assert seconds < 2
    assert ticks > 10


def test_a_short_block_within_the_limit_is_no_error(make_hub):
    hub = make_hub("blocks", reward_timeout_s=20.0, block_s=0.3)

    async def run():
        return await asyncio.gather(*(hub.grade(sample(index)) for index in range(4)))

    assert asyncio.run(run()) == [0.0, 1.0, 2.0, 3.0]


def test_coroutines_run_in_one_thread_that_ends_with_the_hub(make_hub):
    import error_rewards_of_test

    hub = make_hub("where")

    async def run():
        await asyncio.gather(*(hub.grade(sample(index)) for index in range(3)))
        await hub.close()

    asyncio.run(run())
    (thread,) = set(error_rewards_of_test.threads)
    assert thread is not threading.main_thread()
    assert not thread.is_alive()


def batch(*rewards):
    return [[sample(i, reward=r, response="the answer is 5 " * 50, label="5")] for i, r in enumerate(rewards)]


def test_constant_batches_are_counted_and_told_once_in_a_row(caplog):
    alarm = ConstantRewardAlarm(None)
    with caplog.at_level(logging.WARNING):
        counts = [
            alarm.look(batch(*rewards)) for rewards in [(0, 0, 0, 0), (0, 0), (0, 1), (0, 0), (1, 1), (0.5, 0.5)]
        ]
    assert [count["rollout/reward_constant_batches"] for count in counts] == [1, 2, 2, 3, 4, 5]
    told = [record.message for record in caplog.records]
    assert len(told) == 4
    assert "all 4 rewards of this batch are 0;" in told[0]
    assert told[0].count("  - sample ") == 3
    assert "prompt 'prompt number 0'" in told[0]
    assert "the answer is 5" in told[0]
    assert "label '5'" in told[0]
    assert len(told[0]) < 2500
    assert "are 1;" in told[2]
    assert "are 0.5;" in told[3]


def test_one_sample_and_rewards_that_are_missing_raise_no_alarm(caplog):
    alarm = ConstantRewardAlarm("score")
    for groups in ([], batch(0), batch(None, None), batch(1, None), batch({"score": 1}, {"score": 2})):
        assert alarm.look(groups) == {"rollout/reward_constant_batches": 0}
    assert alarm.look(batch({"score": 1}, {"score": 1})) == {"rollout/reward_constant_batches": 1}
    assert len(caplog.records) == 1
