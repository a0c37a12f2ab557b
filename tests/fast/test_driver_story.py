import asyncio
import time

import pytest

from miles.core.fakes import FakeDataSource, FakeEnginePool, fake_run
from miles.errors import CheckpointError, MilesError, TrainingError
from train import train

TWO_STEPS = [
    "publish v1",
    "eval before",
    "rollout 0 with v1",
    "train 0",
    "commit 0",
    "save? 0",
    "publish v2",
    "eval? 0",
    "rollout 1 with v2",
    "train 1",
    "commit 1",
    "save? 1",
    "publish v3",
    "eval? 1",
]


def test_the_loop_tells_its_story_in_milliseconds():
    seen = []
    run = fake_run(2, seen)
    started = time.perf_counter()
    asyncio.run(train(run))
    assert time.perf_counter() - started < 0.2
    assert seen == TWO_STEPS
    assert run.weights.version == 3


def test_every_step_is_logged_and_every_group_is_trained():
    run = fake_run(3, batch_size=4)
    asyncio.run(train(run))
    assert run.tracker.logged == [(0, {"train/loss": 1.0}), (1, {"train/loss": 0.5}), (2, {"train/loss": 1 / 3})]
    assert (run.rollout.ledger.issued, run.rollout.ledger.trained) == (12, 12)
    assert run.rollout.ledger.groups("in_flight", "partial", "ready", "leased") == []


@pytest.mark.parametrize("last", TWO_STEPS)
def test_a_part_that_raises_stops_the_loop_there_and_frees_the_machine(last):
    failure = TrainingError(f"{last} failed")
    run = fake_run(2, failures={last: failure})
    with pytest.raises(TrainingError) as caught:
        asyncio.run(train(run))
    assert caught.value is failure
    assert run.story.events == TWO_STEPS[: TWO_STEPS.index(last) + 1]
    assert run.placement.phase is None


def test_a_step_that_failed_leaves_its_groups_leased():
    run = fake_run(2, failures={"train 1": TrainingError("NaN")})
    with pytest.raises(TrainingError):
        asyncio.run(train(run))
    assert run.rollout.ledger.trained == 2
    assert run.rollout.ledger.groups("leased") == [2, 3]


def test_a_resumed_run_goes_on_with_the_next_group_and_the_next_step():
    first = fake_run(1)
    asyncio.run(train(first))
    state = first.checkpoints.load(0)
    second = fake_run(2, start=1)
    second.rollout.data_source.load_state_dict(state["data_source"])
    assert second.rollout.ledger.load_state_dict(state["ledger"]) == []
    asyncio.run(train(second))
    assert second.story.events[2] == "rollout 1 with v1"
    assert second.rollout.ledger.trained == 4
    with pytest.raises(CheckpointError, match="nothing was saved after step 7"):
        first.checkpoints.load(7)


def test_training_without_the_machine_is_refused():
    run = fake_run(1)

    async def without_placement():
        await run.trainer.train(await run.rollout.generate(0))

    with pytest.raises(MilesError, match="held for nothing, not for rollout"):
        asyncio.run(without_placement())

    async def overlap():
        async with run.placement.for_rollout():
            await run.weights.publish()

    with pytest.raises(MilesError, match="held for rollout and cannot be held for weight sync"):
        asyncio.run(overlap())


def test_the_fake_data_source_issues_returned_groups_first_and_survives_a_checkpoint():
    source = FakeDataSource(num_prompts=3, n_samples_per_prompt=2)
    first = source.get_samples(2)
    assert [[s.index for s in group] for group in first] == [[0, 1], [2, 3]]
    source.add_samples([first[1]])
    resumed = FakeDataSource(num_prompts=3, n_samples_per_prompt=2)
    resumed.load_state_dict(source.state_dict())
    for one in (source, resumed):
        groups = one.get_samples(3)
        assert [g[0].group_index for g in groups] == [1, 2, 3]
        assert groups[2][0].prompt == "prompt 0"


def test_the_fake_engine_pool_has_one_address_per_engine():
    pool = FakeEnginePool(num_engines=3)
    assert len({e.url for e in pool.engines()}) == 3
    assert pool.router().url not in {e.url for e in pool.engines()}
