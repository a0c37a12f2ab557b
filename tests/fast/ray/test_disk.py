"""Whole runs on a disk that fills up, or that takes nothing."""

import json

import pytest

from tests.fast.ray.conftest import TrainProcess

REWARD = ["--custom-rm-path", "tests.fast.ray.test_run.reward_digits"]


@pytest.mark.slow
def test_a_run_on_a_disk_that_fills_up_ends_with_its_reason_and_whole_files(flags, small_disk):
    run = small_disk.folder / "run"
    more = ["--run-dir", str(run), "--num-rollout", "1000", "--weights.reload-interval", "0"]
    ended = TrainProcess(*flags, *REWARD, *more).end()
    assert ended.status == 1, ended.err
    assert f"error: cannot write {run}/" in ended.err
    assert "No space left on device; 0.0 MiB free" in ended.err
    assert "Traceback" not in ended.err
    assert ended.left_behind == []
    files = [run / "metrics.jsonl", *(run / "rollouts").glob("*.jsonl")]
    assert len(files) > 2
    for file in files:
        assert all(json.loads(line) for line in file.read_text().splitlines()), file


def test_a_run_folder_that_is_read_only_is_told_before_anything_starts(flags, small_disk):
    run = small_disk.folder / "run"
    run.mkdir()
    small_disk.remount("ro")
    ended = TrainProcess(*flags, *REWARD, "--run-dir", str(run)).end()
    small_disk.remount("rw")
    assert ended.status == 2
    assert f"run.dir: cannot write the run folder {run}: Read-only file system" in ended.err
    assert "--run-dir FOLDER" in ended.err
    assert "Traceback" not in ended.err
    assert ended.left_behind == []
