"""The driver's side of recovery against a pool that follows a script."""

import asyncio
import json

import pytest

from miles.core.ports import RolloutBatch
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.errors import EngineError, WeightSyncError
from miles.ray import recovery as module
from miles.ray.engine_pool import Died, EngineRestarted, RouterRestarted
from miles.ray.phases import PhasedTrainer, PhaseLog
from miles.ray.recovery import Recovery
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.events import EventLog
from miles.utils.waits import Waits

ENGINE = EngineEndpoint(url="http://127.0.0.1:1", engine_id="engine-0", pid=10, token="t")
ROUTER = RouterEndpoint(url="http://127.0.0.1:2", pid=20, token="t")
ENGINE_DIED = Died(name="engine-0", pid=9, error="was killed", log_path="engine-0.log")
ENGINE_BACK = EngineRestarted(engine=ENGINE, actor_pid=11, seconds=1.0, restarts=1)
ROUTER_DIED = Died(name="router", pid=19, error="was killed", log_path="router.log")
ROUTER_BACK = RouterRestarted(router=ROUTER, seconds=1.0, restarts=1)
FATAL = EngineError("the engine's process was killed by signal 9", engine="engine-0")


@pytest.fixture(autouse=True)
def no_long_notice(monkeypatch):
    monkeypatch.setattr(module, "DEATH_NOTICE_S", 0.05)


class Pool:
    """Stands for the manager's actor and its pool; notes what it is asked."""

    def __init__(self) -> None:
        self.pool = self
        self.events: asyncio.Queue = asyncio.Queue()
        self.serving = [ENGINE]
        self.told: list[str] = []

    async def remote(self, method, *args):
        if method == "next_event":
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            return event
        self.told.append(method)
        return list(self.serving)


class Weights:
    version = 4

    def __init__(self, told: list[str], *, brings_up=True, publishes=()) -> None:
        self.told, self.brings_up, self.results = told, brings_up, list(publishes)

    def set_engines(self, engines) -> None:
        self.told.append("set_engines")

    async def bring_up(self, engine):
        self.told.append("bring_up")
        if isinstance(self.brings_up, Exception):
            raise self.brings_up
        return self.brings_up

    async def publish(self):
        self.told.append("publish")
        await asyncio.sleep(0.02)
        if self.results and (error := self.results.pop(0)):
            raise error
        return {"published": 1.0}

    async def publish_if_due(self, step):
        return await self.publish()


def make(tmp_path, pool: Pool, **weights) -> Recovery:
    events = EventLog(tmp_path / "events.jsonl")
    waits = Waits(report_s=30, deadline_s=30, report=print)
    return Recovery(pool, Weights(pool.told, **weights), waits, Console(), events, PhaseLog(events))


def noted(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]


async def until(condition) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing of the kind happened")


def test_an_engine_with_the_current_weights_serves_at_once_and_is_told(tmp_path, capsys):
    async def story():
        pool = Pool()
        recovery = make(tmp_path, pool)
        async with recovery.running():
            pool.events.put_nowait(ENGINE_DIED)
            pool.events.put_nowait(ENGINE_BACK)
            await until(lambda: "admit" in pool.told)
            await until(lambda: len(noted(tmp_path)) == 2)
        assert pool.told == ["serving", "set_engines", "bring_up", "admit"]

    asyncio.run(story())
    died, back = noted(tmp_path)
    assert (died["event"], died["pid"], died["log"]) == ("engine died", 9, "engine-0.log")
    assert (back["event"], back["pid"], back["actor_pid"], back["version"]) == ("engine restarted", 10, 11, 4)
    out = capsys.readouterr().out
    assert "engine-0 died and is started again: was killed" in out
    assert "engine-0 serves again after 1.0 s, with weights 4" in out


def test_an_engine_behind_the_trainer_serves_after_the_next_update_and_not_before(tmp_path):
    async def story():
        pool = Pool()
        recovery = make(tmp_path, pool, brings_up=False)
        async with recovery.running():
            pool.events.put_nowait(ENGINE_BACK)
            await until(lambda: (tmp_path / "events.jsonl").read_text())
            assert "admit" not in pool.told
            assert await recovery.publish_if_due(0) == {"published": 1.0}
            assert pool.told[-2:] == ["publish", "admit"]
            await recovery.publish_if_due(1)
            assert pool.told[-1] == "publish"  # once is enough

    asyncio.run(story())


def test_an_engine_that_dies_while_it_gets_its_weights_is_left_to_its_next_restart(tmp_path):
    async def story():
        pool = Pool()
        recovery = make(tmp_path, pool, brings_up=EngineError("reset"))
        async with recovery.running():
            pool.events.put_nowait(ENGINE_BACK)
            await until(lambda: "bring_up" in pool.told)
            pool.serving.clear()
            await until(lambda: pool.told.count("serving") == 2)
            await asyncio.sleep(0.02)
        assert "admit" not in pool.told

    asyncio.run(story())


def test_an_engine_that_lives_but_is_not_proven_ends_the_run(tmp_path):
    async def story():
        pool = Pool()
        async with make(tmp_path, pool, brings_up=WeightSyncError("differs")).running():
            pool.events.put_nowait(ENGINE_BACK)
            await asyncio.sleep(10)

    with pytest.raises(WeightSyncError, match="differs"):
        asyncio.run(story())


def test_what_is_not_started_again_ends_the_loop_with_its_own_error(tmp_path):
    async def story():
        pool = Pool()
        async with make(tmp_path, pool).running():
            pool.events.put_nowait(FATAL)
            await asyncio.sleep(10)

    with pytest.raises(EngineError, match="engine-0: the engine's process was killed by signal 9"):
        asyncio.run(story())


def test_a_death_that_is_seen_late_explains_the_call_that_failed_first(tmp_path):
    async def story():
        pool = Pool()
        async with make(tmp_path, pool).running():
            asyncio.get_running_loop().call_later(0.02, pool.events.put_nowait, FATAL)
            raise EngineError("no answer")

    with pytest.raises(EngineError, match="killed by signal 9") as caught:
        asyncio.run(story())
    assert "no answer" in str(caught.value.__cause__)


def test_an_interrupt_stays_an_interrupt(tmp_path):
    async def story():
        pool = Pool()
        async with make(tmp_path, pool).running():
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(story())


def test_an_update_during_which_the_router_died_is_repeated_before_the_router_gets_engines(tmp_path):
    async def story():
        pool = Pool()
        recovery = make(tmp_path, pool, publishes=[WeightSyncError("the router is gone")])
        async with recovery.running():
            pool.events.put_nowait(ROUTER_DIED)
            pool.events.put_nowait(ROUTER_BACK)
            assert await recovery.publish_if_due(2) == {"published": 1.0}
            await until(lambda: "refill_router" in pool.told)
        assert pool.told == ["publish", "publish", "refill_router"]

    asyncio.run(story())
    names = [event["event"] for event in noted(tmp_path)]
    assert names == ["phase", "router died", "weight update repeated", "router restarted"]


def test_an_update_that_fails_while_all_live_fails_the_run(tmp_path):
    async def story():
        pool = Pool()
        recovery = make(tmp_path, pool, publishes=[WeightSyncError("differs")])
        async with recovery.running():
            await recovery.publish()

    with pytest.raises(WeightSyncError, match="differs"):
        asyncio.run(story())


def test_phases_are_noted_when_they_begin(tmp_path):
    class Trainer:
        name = "t"

        async def train(self, batch):
            return {"loss": 1.0}

        async def save(self, folder):
            return None

    async def story():
        trainer = PhasedTrainer(Trainer(), PhaseLog(EventLog(tmp_path / "events.jsonl")))
        assert await trainer.train(RolloutBatch(step=3, data=None, group_indices=(), num_samples=0)) == {"loss": 1.0}
        await trainer.save("x")
        assert trainer.name == "t"

    asyncio.run(story())
    assert [(e["phase"], e["step"]) for e in noted(tmp_path)] == [("train", 3), ("save", 3)]
