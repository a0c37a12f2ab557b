from pathlib import Path

import pytest

from miles.errors import CheckpointError
from miles.utils import checkpoint_folder as ckpt


def save(root, iteration, **state):
    with ckpt.writing(root, iteration) as draft:
        ckpt.write_state(draft, state)


def test_a_written_checkpoint_is_complete_and_the_latest(tmp_path):
    save(tmp_path, 2, step=2)
    save(tmp_path, 10, step=10)
    assert ckpt.complete_iterations(tmp_path) == [2, 10]
    assert (tmp_path / ckpt.LATEST).read_text() == "10\n"
    assert ckpt.resolve(tmp_path) == tmp_path / "iter_0000010"
    assert ckpt.read_state(ckpt.resolve(tmp_path)) == {"step": 10}
    assert ckpt.resolve(tmp_path / "iter_0000002").name == "iter_0000002"


def test_a_save_that_fails_leaves_the_older_checkpoint_and_no_litter(tmp_path):
    save(tmp_path, 1)

    def half_a_save():
        with ckpt.writing(tmp_path, 2) as draft:
            (draft / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        half_a_save()
    assert ckpt.complete_iterations(tmp_path) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", ckpt.LATEST]


def test_a_checkpoint_without_its_marker_is_skipped_and_refused_by_name(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "iter_0000002" / ckpt.MARKER).unlink()
    assert ckpt.resolve(tmp_path).name == "iter_0000001"
    with pytest.raises(CheckpointError, match="incomplete"):
        ckpt.resolve(tmp_path / "iter_0000002")


def test_saving_an_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 3, note="old")
    save(tmp_path, 3, note="new")
    assert ckpt.read_state(ckpt.resolve(tmp_path)) == {"note": "new"}


def test_a_replacement_that_fails_keeps_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    save(tmp_path, 3, note="old")
    rename = Path.rename

    def full(self, target):
        if self.name.endswith(".partial"):
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 3, note="new")
    assert ckpt.read_state(ckpt.resolve(tmp_path)) == {"note": "old"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", ckpt.LATEST]


@pytest.mark.parametrize(("text", "told"), [("{", "unreadable"), ('{"format": 99}', "another version")])
def test_a_state_that_cannot_be_read_is_an_error(tmp_path, text, told):
    (tmp_path / ckpt.STATE).write_text(text)
    with pytest.raises(CheckpointError, match=told):
        ckpt.read_state(tmp_path)


def test_a_state_that_json_cannot_hold_is_an_error_that_names_who_may_have_made_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"no JSON.*set.*\n.*state_dict\(\) of your data source"):
        ckpt.write_state(tmp_path, {"rollout": {"data_source": {"seen": {1, 2}}}})


def test_a_folder_without_checkpoints_says_what_to_pass(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        ckpt.resolve(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        ckpt.resolve(tmp_path / "absent")


def test_what_a_killed_run_left_half_written_is_removed_by_the_next_save(tmp_path):
    (tmp_path / ".iter_0000004.123.partial").mkdir()
    save(tmp_path, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", ckpt.LATEST]


def names(root):
    return sorted(p.name for p in root.iterdir() if p.name != ckpt.LATEST)


def test_older_checkpoints_beyond_those_to_keep_are_removed(tmp_path):
    for iteration in (1, 2, 3, 4):
        save(tmp_path, iteration)
    ckpt.remove_older(tmp_path, 4, 2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004"]
    ckpt.remove_older(tmp_path, 4, 5)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004"]
    ckpt.remove_older(tmp_path, 4, 1)
    assert ckpt.resolve(tmp_path).name == "iter_0000004"


def test_what_is_never_removed_the_newest_the_loaded_later_ones_and_incomplete_ones(tmp_path):
    for iteration in (1, 2, 3, 4, 9):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000002" / ckpt.MARKER).unlink()
    ckpt.remove_older(tmp_path, 4, 1, tmp_path / "." / "iter_0000001")
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000004", "iter_0000009"]


def test_a_removal_that_was_killed_is_finished_by_the_next(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".iter_0000000.7.removed").mkdir()
    ckpt.remove_older(tmp_path, 1, 1)
    assert names(tmp_path) == ["iter_0000001"]


def test_a_checkpoint_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)

    def refuse(self, target):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="iter_0000001: an old checkpoint cannot be removed"):
        ckpt.remove_older(tmp_path, 2, 1)
