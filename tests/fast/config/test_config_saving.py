import os

from miles.config.checks import saving_saves
from miles.config.preflight import checkpoints_can_be_written
from miles.config.schema import RunConfig


def issues(check, **checkpoint):
    return [f"{issue.path}: {issue.problem}" for issue in check(RunConfig.model_validate({"checkpoint": checkpoint}))]


def test_saving_beside_training_needs_something_that_saves():
    (told,) = issues(saving_saves, async_save=True)
    assert told.startswith("checkpoint.async_save: is asked for, but without --save-interval")
    assert issues(saving_saves, async_save=True, save_interval=2) == []


def test_a_folder_of_checkpoints_that_cannot_be_made_is_told_before_the_run(tmp_path, monkeypatch):
    def told(folder):
        return issues(checkpoints_can_be_written, save=str(folder), save_interval=1)

    assert told(tmp_path / "new" / "folder") == []
    (tmp_path / "file").write_text("")
    assert told(tmp_path / "file" / "folder") == [f"checkpoint.save: {tmp_path / 'file'} is not a folder"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert told(tmp_path / "new") == [f"checkpoint.save: {tmp_path} may not be written to"]
