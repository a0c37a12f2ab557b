import asyncio
import gc
import time

import pytest

from miles.errors import StalledError
from miles.utils.waits import OpenWaits, Waits


def test_a_wait_that_ends_gives_its_result_and_reports_nothing():
    told = []
    open_waits = OpenWaits()
    waits = Waits(report_s=5, deadline_s=5, report=told.append, open_waits=open_waits)
    assert asyncio.run(waits.on("engine", "start", asyncio.sleep(0, "up"))) == "up"
    assert told == []
    assert open_waits.list() == []


def test_a_long_wait_is_reported_by_owner_and_name_each_time_the_interval_passes():
    told = []
    waits = Waits(report_s=0.02, deadline_s=5, report=told.append)
    asyncio.run(waits.on("trainer", "train step 3", asyncio.sleep(0.09)))
    assert len(told) >= 3
    assert "trainer: train step 3" in told[0]


def test_a_wait_past_its_deadline_raises_with_its_name_and_cancels_what_it_waited_for():
    cancelled = []

    async def never():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def story():
        waits = Waits(report_s=5, deadline_s=0.05, report=print)
        with pytest.raises(StalledError, match="rollout manager: generate step 7"):
            await waits.on("rollout manager", "generate step 7", never())
        await asyncio.sleep(0)

    asyncio.run(story())
    assert cancelled == [True]


def test_an_error_of_what_is_waited_for_rises_unchanged():
    async def fail():
        raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        asyncio.run(Waits(report_s=1, deadline_s=1, report=print).on("x", "y", fail()))


def test_the_waits_of_now_are_grouped_by_owner_and_name_oldest_first():
    open_waits = OpenWaits()
    waits = Waits(report_s=5, deadline_s=5, report=print, open_waits=open_waits)

    async def three():
        names = ["start", "flush", "start"]
        jobs = [asyncio.ensure_future(waits.on("engine", what, asyncio.sleep(0.05))) for what in names]
        await asyncio.sleep(0.01)
        found = open_waits.grouped()
        await asyncio.gather(*jobs)
        return found

    assert [(g.owner, g.name, g.count) for g in asyncio.run(three())] == [
        ("engine", "start", 2),
        ("engine", "flush", 1),
    ]
    assert open_waits.list() == []


class Explains:
    def long_wait(self, owner, name):
        return f"probably: {owner} is slow at {name}"

    def stalled(self, owner, name):
        return "wait graph: ..."


def test_a_long_wait_is_told_with_its_end_and_a_stall_with_the_whole_graph():
    told = []
    waits = Waits(report_s=0.03, deadline_s=0.1, report=told.append, explainer=Explains(), open_waits=OpenWaits())
    with pytest.raises(StalledError, match=r"generate step 7; the limit is 0 s\nwait graph: \.\.\.\n    fix: "):
        asyncio.run(waits.on("rollout manager", "generate step 7", asyncio.sleep(60)))
    assert told
    assert told[0].endswith("so far; probably: rollout manager is slow at generate step 7")


def test_of_waits_inside_waits_the_innermost_is_told_and_names_the_outer_one():
    open_waits = OpenWaits()

    async def request(sample):
        with open_waits.on("router", "generate", sample=sample):
            await asyncio.sleep(0.05)

    async def story():
        with open_waits.on("my.agent", "generate", group=3):
            jobs = [asyncio.create_task(request(n)) for n in (7, 8)]
        with open_waits.on("my.agent", "generate", group=4):
            jobs.append(asyncio.create_task(request(9)))
            await asyncio.sleep(0.01)
            found = open_waits.grouped()
            await asyncio.gather(*jobs)
            return found, open_waits.grouped()

    during, after = asyncio.run(story())
    assert [(g.owner, g.subjects, g.within) for g in during] == [
        ("router", ("sample 7", "sample 8"), ""),  # what they were started in has ended
        ("router", ("sample 9",), "my.agent: generate"),
    ]
    assert [(g.owner, g.within) for g in after] == [("my.agent", "")]


def test_a_wait_for_a_prompt_costs_microseconds():
    open_waits = OpenWaits()
    began = time.perf_counter()
    for sample in range(10000):
        with open_waits.on("my.reward", "reward", group=1, sample=sample):
            pass
    assert (time.perf_counter() - began) / 10000 < 20e-6  # about one on an idle core


def test_a_wait_that_ends_in_an_error_is_open_no_more():
    open_waits = OpenWaits()

    def fail():
        with open_waits.on("my.reward", "reward", group=12, sample=98):
            assert [wait.subject() for wait in open_waits.list()] == ["group 12 sample 98"]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert open_waits.list() == []


def test_what_is_given_up_is_not_reported_as_an_error_never_looked_at(caplog):
    async def fail_when_cancelled():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("connection lost") from None

    async def story():
        waits = Waits(report_s=5, deadline_s=0.02, report=print)
        with pytest.raises(StalledError):
            await waits.on("trainer", "start", asyncio.gather(fail_when_cancelled()))
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(story())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_nor_is_what_fails_in_the_moment_in_which_its_wait_is_cancelled(caplog):
    async def story():
        answer = asyncio.get_running_loop().create_future()

        async def died():
            return await answer

        waits = Waits(report_s=5, deadline_s=5, report=print)
        waiting = asyncio.create_task(waits.on("rollout manager", "generate", died()))
        await asyncio.sleep(0.01)
        answer.set_exception(OSError("the actor died"))
        asyncio.get_running_loop().call_soon(waiting.cancel)  # after `died` has failed, before its wait is told
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(story())
    gc.collect()
    assert "never retrieved" not in caplog.text
