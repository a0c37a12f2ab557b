import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from miles.core.fakes import fake_run
from miles.errors import CheckpointError
from miles.ray.checkpoints import IntervalCheckpoints
from miles.utils.checkpoint_folder import complete_iterations, read_state
from train import train


def run_of(folder, num_steps, interval=None, *, start=0, failures=None, on_train=None, **options):
    """A run of fakes that saves to `folder` for real; `on_train(step)` is called when a step is trained."""
    run = fake_run(num_steps, start=start, failures=failures)
    if on_train is not None:
        inner = run.trainer.train

        async def trained(batch):
            on_train(batch.step)
            return await inner(batch)

        run.trainer.train = trained
    parts = {"trainer": run.trainer, "rollout": run.rollout, "weights": run.weights, "tracker": run.tracker}
    return replace(run, checkpoints=IntervalCheckpoints(folder, interval, run.steps, **parts, **options))


def touch_at(sentinel: Path, *steps: int):
    return lambda step: sentinel.write_text("") if step in steps else None


def test_a_file_asks_for_one_checkpoint_without_an_interval(tmp_path):
    sentinel = tmp_path / "save-now"
    run = run_of(tmp_path, 4, sentinel=sentinel, on_train=touch_at(sentinel, 1))
    asyncio.run(train(run))
    assert complete_iterations(tmp_path) == [2]
    assert read_state(tmp_path / "iter_0000002")["next_step"] == 2
    assert not sentinel.exists()
    saved = next(i for i, event in enumerate(run.story.events) if event.startswith("save "))
    assert run.story.events[saved - 1] == "commit 1"


def test_a_file_asks_in_addition_to_the_interval_and_a_step_due_anyway_answers_it(tmp_path):
    sentinel = tmp_path / "save-now"
    asyncio.run(train(run_of(tmp_path, 5, 2, sentinel=sentinel, on_train=touch_at(sentinel, 0, 3))))
    assert complete_iterations(tmp_path) == [1, 2, 4, 5]
    assert not sentinel.exists()


def test_a_request_whose_save_fails_stays(tmp_path):
    sentinel = tmp_path / "save-now"
    run = run_of(tmp_path, 1, sentinel=sentinel, on_train=touch_at(sentinel, 0))

    async def full(folder):
        raise OSError("disk full")

    run.trainer.save = full
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(train(run))
    assert sentinel.exists()
    assert complete_iterations(tmp_path) == []


def test_a_request_that_cannot_be_deleted_ends_the_run_with_a_complete_checkpoint(tmp_path, monkeypatch):
    sentinel = tmp_path / "save-now"
    sentinel.write_text("")

    def refuse(self, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CheckpointError, match=r"save-now: cannot be deleted.*\n.*--save-trigger-sentinel"):
        asyncio.run(train(run_of(tmp_path, 1, sentinel=sentinel)))
    assert complete_iterations(tmp_path) == [1]


def test_the_last_checkpoints_are_kept_and_the_one_that_was_loaded(tmp_path):
    asyncio.run(train(run_of(tmp_path, 3, 1, keep_last=2)))
    assert complete_iterations(tmp_path) == [2, 3]
    resumed = run_of(tmp_path, 6, 1, start=3, keep_last=2, loaded_from=tmp_path / "iter_0000003")
    asyncio.run(train(resumed))
    assert complete_iterations(tmp_path) == [3, 5, 6]


def test_a_save_that_fails_removes_nothing(tmp_path):
    asyncio.run(train(run_of(tmp_path, 2, 1)))
    run = run_of(tmp_path, 3, 1, start=2, keep_last=1)

    async def full(folder):
        raise OSError("disk full")

    run.trainer.save = full
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(train(run))
    assert complete_iterations(tmp_path) == [1, 2]
