import asyncio
import gc

import pytest

from miles.errors import StalledError
from miles.utils.waits import Waits


def test_a_wait_that_ends_gives_its_result_and_reports_nothing():
    told = []
    waits = Waits(report_s=5, deadline_s=5, report=told.append)
    assert asyncio.run(waits.on("engine", "start", asyncio.sleep(0, "up"))) == "up"
    assert told == []
    assert waits.open() == []


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


def test_the_waits_of_now_are_told_one_a_line_oldest_first():
    waits = Waits(report_s=5, deadline_s=5, report=print)

    async def two():
        jobs = [asyncio.ensure_future(waits.on("engine", what, asyncio.sleep(0.05))) for what in ("start", "flush")]
        await asyncio.sleep(0.01)
        told = waits.describe()
        await asyncio.gather(*jobs)
        return told

    assert asyncio.run(two()).splitlines() == [
        "  waiting for engine: start, 0 s so far",
        "  waiting for engine: flush, 0 s so far",
    ]
    assert waits.describe() == "  waiting for no other process"


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
