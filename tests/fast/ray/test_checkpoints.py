import asyncio
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miles.core.fakes import fake_run
from miles.errors import CheckpointError
from miles.ray.checkpoints import IntervalCheckpoints
from miles.utils import run_record
from miles.utils.checkpoint_folder import LATEST, complete_iterations, read_state, resolve, skipped
from miles.utils.run_record import RunRecord
from train import train

ROOT = Path(__file__).resolve().parents[3]
RECORD = RunRecord("run-1", {"rollout": {"batch_size": 2}})


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
    parts |= {"record": RECORD}
    return replace(run, checkpoints=IntervalCheckpoints(folder, interval, run.steps, **parts, **options))


def touch_at(sentinel: Path, *steps: int):
    return lambda step: sentinel.write_text("") if step in steps else None


def test_a_file_asks_for_one_checkpoint_without_an_interval(tmp_path):
    sentinel = tmp_path / "save-now"
    run = run_of(tmp_path, 4, sentinel=sentinel, on_train=touch_at(sentinel, 1))
    asyncio.run(train(run))
    assert complete_iterations(tmp_path) == [2]
    assert read_state(tmp_path / "iter_0000002")["next_step"] == 2
    assert run_record.read(tmp_path / "iter_0000002") == RECORD
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
    with pytest.raises(CheckpointError, match=r"cannot be written: disk full.*MiB free"):
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


# G07: a save that fails ends the run, the checkpoint before it stays.
def test_a_save_that_fails_removes_nothing(tmp_path):
    asyncio.run(train(run_of(tmp_path, 2, 1)))
    run = run_of(tmp_path, 3, 1, start=2, keep_last=1)

    async def full(folder):
        raise OSError("disk full")

    run.trainer.save = full
    with pytest.raises(CheckpointError, match=r"cannot be written: disk full.*MiB free"):
        asyncio.run(train(run))
    assert complete_iterations(tmp_path) == [1, 2]
    assert [p.name for p in tmp_path.glob(".*")] == []


class Disk:
    """Where copies of the trainer are written: slowly, until `free` is set, and perhaps with an error then."""

    def __init__(self) -> None:
        self.begun, self.free, self.error = [], asyncio.Event(), None

    async def write(self, folder: str) -> float:
        self.begun.append(Path(folder).name.split(".")[1])
        Path(folder, "half").write_text("x")
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return 1.5


def play_in_background(folder, num_steps, interval, after_train, **options):
    """The loop of a run that saves in the background; `after_train(disk, step)` is awaited when a step is trained."""

    async def go():
        disk = Disk()
        run = run_of(folder, num_steps, interval, in_background=True, **options)
        run.trainer.save_copy = disk.write
        inner = run.trainer.train

        async def trained(batch):
            await asyncio.sleep(0.02)
            await after_train(disk, batch.step)
            return await inner(batch)

        run.trainer.train = trained
        async with run.checkpoints.running():
            await train(run)
            disk.free.set()
        return run, disk

    return asyncio.run(go())


async def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


def test_steps_go_on_while_a_checkpoint_is_written_and_the_end_waits_for_it(tmp_path):
    async def after_train(disk, step):
        if step > 0:
            await wait_for(lambda: disk.begun)
        assert complete_iterations(tmp_path) == []

    sentinel = tmp_path / "save-now"
    sentinel.write_text("")
    run, disk = play_in_background(tmp_path, 4, None, after_train, sentinel=sentinel)
    assert disk.begun == ["iter_0000001"]
    assert not sentinel.exists()
    assert complete_iterations(tmp_path) == [1]
    events = run.story.events
    assert events[events.index("copy state") - 1] == "commit 0"
    assert {"train 1", "train 2", "train 3"} <= set(events)
    assert run_record.read(tmp_path / "iter_0000001") == RECORD
    state = read_state(tmp_path / "iter_0000001")
    assert (state["next_step"], state["weight_version"]) == (1, 1)
    assert state["rollout"]["ledger"]["trained"] == state["rollout"]["data_source"]["next_group"] > 0
    assert state["rollout"]["ledger"]["trained"] * 4 == run.rollout.ledger.state_dict()["trained"]
    assert [(step, m["perf/save_write_time"]) for step, m in run.tracker.logged if "perf/save_write_time" in m] == [
        (0, 1.5)
    ]


def test_a_save_waits_for_the_one_before(tmp_path):
    async def after_train(disk, step):
        if step == 1:
            await wait_for(lambda: disk.begun)
            asyncio.get_running_loop().call_later(0.1, disk.free.set)

    _, disk = play_in_background(tmp_path, 3, 1, after_train, keep_last=2)
    assert disk.begun == ["iter_0000001", "iter_0000002", "iter_0000003"]
    assert complete_iterations(tmp_path) == [2, 3]


def test_a_write_that_fails_ends_the_run_at_the_next_step_and_leaves_the_checkpoint_before(tmp_path):
    trained = []

    async def after_train(disk, step):
        trained.append(step)
        if step == 1:
            disk.free.set()
            await wait_for(lambda: complete_iterations(tmp_path) == [1])
            disk.error = OSError(28, "No space left on device")
        if step == 2:
            await wait_for(lambda: len(disk.begun) == 2 and not list(tmp_path.glob(".*.partial")))

    with pytest.raises(CheckpointError, match=r"iter_0000002.*No space left on device.*MiB free"):
        play_in_background(tmp_path, 10, 1, after_train)
    assert trained == [0, 1, 2]
    assert complete_iterations(tmp_path) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", LATEST]


def test_a_write_that_fails_at_the_end_of_the_run_ends_it_with_the_error(tmp_path):
    async def after_train(disk, step):
        disk.error = OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        play_in_background(tmp_path, 1, 1, after_train)


def test_a_run_that_fails_discards_what_is_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.ray.checkpoints.LAST_MOMENT_S", 0.05)

    async def after_train(disk, step):
        if step == 1:
            await wait_for(lambda: disk.begun)
            raise ValueError("engine lost")

    with pytest.raises(ValueError, match="engine lost"):
        play_in_background(tmp_path, 3, 1, after_train)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_lets_a_write_that_is_nearly_done_end(tmp_path):
    async def after_train(disk, step):
        if step == 1:
            await wait_for(lambda: disk.begun)
            asyncio.get_running_loop().call_later(0.1, disk.free.set)
            raise ValueError("engine lost")

    with pytest.raises(ValueError, match="engine lost"):
        play_in_background(tmp_path, 3, 1, after_train)
    assert complete_iterations(tmp_path) == [1]


def test_an_interrupt_while_the_end_waits_for_a_write_lets_it_end(tmp_path):
    async def go():
        disk, run = Disk(), run_of(tmp_path, 1, 1, in_background=True)
        run.trainer.save_copy = disk.write

        async def whole():
            async with run.checkpoints.running():
                await train(run)

        task = asyncio.create_task(whole())
        await wait_for(lambda: disk.begun)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        disk.free.set()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(go())
    assert complete_iterations(tmp_path) == [1]


def test_a_run_that_is_killed_while_it_writes_leaves_the_checkpoint_before_as_the_latest(tmp_path):
    asyncio.run(train(run_of(tmp_path, 1, 1)))
    code = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from tests.fast.ray.test_checkpoints import play_in_background, wait_for\n"
        "async def after_train(disk, step):\n"
        "    if step == 2:\n"
        "        await wait_for(lambda: disk.begun)\n"
        "        os.kill(os.getpid(), 9)\n"
        "play_in_background(Path(sys.argv[1]), 5, 1, after_train, start=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9, done.stderr
    assert resolve(tmp_path) == tmp_path / "iter_0000001"
    (told,) = skipped(tmp_path)
    assert re.search(r"\.iter_0000002\.\d+\.partial is incomplete: it was being written when its run ended", told)
