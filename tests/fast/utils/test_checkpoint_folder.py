import errno
import os
import shutil
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


# G07
def test_a_save_that_fails_leaves_the_older_checkpoint_and_no_litter(tmp_path):
    save(tmp_path, 1)

    def half_a_save():
        with ckpt.writing(tmp_path, 2) as draft:
            (draft / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(CheckpointError, match=r"iter_0000002.*: disk full; [\d.]+ MiB free.*\n    fix: .*--load"):
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
    with pytest.raises(CheckpointError, match=r"iter_0000003: the checkpoint cannot be written: disk full"):
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
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        ckpt.resolve(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        ckpt.resolve(tmp_path / "absent")


# G01: the same command line starts a run and goes on with it.
def test_an_empty_folder_holds_no_checkpoint_yet_nor_does_one_whose_first_save_was_cut_short(tmp_path):
    assert ckpt.resolve(tmp_path) is None
    assert ckpt.skipped(tmp_path) == []
    (tmp_path / ".iter_0000004.123.partial").mkdir()
    assert ckpt.resolve(tmp_path) is None
    (tmp_path / "iter_0000004").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        ckpt.resolve(tmp_path)


# G06
def test_checkpoints_that_were_cut_short_are_named_when_an_older_one_is_taken(tmp_path):
    for iteration in (5, 10, 20):
        save(tmp_path, iteration)
    for iteration in (5, 20):
        (tmp_path / f"iter_00000{iteration:02}" / ckpt.MARKER).unlink()
    (tmp_path / ".iter_0000030.7.partial").mkdir()
    assert ckpt.resolve(tmp_path) == tmp_path / "iter_0000010"
    assert ckpt.skipped(tmp_path) == [
        f"{tmp_path}/iter_0000020 is incomplete: it has no COMPLETE file",
        f"{tmp_path}/.iter_0000030.7.partial is incomplete: it was being written when its run ended",
    ]
    assert ckpt.skipped(tmp_path / "iter_0000010") == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints/.*: Not a directory; .*MiB free"):
        save(tmp_path / "file" / "checkpoints", 1)

    def read_only(self, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*\n    fix: .*not read-only"):
        save(tmp_path, 1)


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


AGES = ["old", "new", "newer"]
CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir")


def killed_before_call(number, work):
    """Do `work` in a process that is killed before its `number`th change of a folder; False when it makes fewer."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(change):
            def call(*args, **kwargs):
                nonlocal count
                if count == number:
                    os._exit(9)
                count += 1
                return change(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def save_files(root, age):
    with ckpt.writing(root, 3) as draft:
        (draft / "trainer").mkdir()
        for file in (draft / "trainer" / "a", draft / "trainer" / "b"):
            file.write_text(age)
        ckpt.write_state(draft, {"age": age})


def age_of_whole(checkpoint):
    age = ckpt.read_state(checkpoint)["age"]
    assert [(checkpoint / "trainer" / name).read_text() for name in "ab"] == [age, age]
    return AGES.index(age)


def folders_after_each_kill(before, work):
    """Copies of the folder `before` in which `work(folder)` was killed, at one moment after the other."""
    number = 0
    while True:
        folder = before.with_name(f"{before.name}-{number}")
        shutil.copytree(before, folder)
        if not killed_before_call(number, lambda folder=folder: work(folder)):
            return
        yield folder
        number += 1


def test_a_kill_at_any_moment_of_a_replacement_or_of_its_recovery_loses_no_checkpoint(tmp_path):
    first, ages, seen = tmp_path / "first", [], set()
    save(first, 2)
    save_files(first, "old")
    for root in folders_after_each_kill(first, lambda folder: save_files(folder, "new")):
        in_place = (root / "iter_0000003").exists()
        left = list(root.glob(".*.replaced"))
        seen.add((in_place, bool(left)))
        for again in () if in_place else folders_after_each_kill(root, lambda folder: save_files(folder, "newer")):
            assert age_of_whole(ckpt.resolve(again)) >= AGES.index("new")
        ages.append(age_of_whole(ckpt.resolve(root / "iter_0000003")))
        assert ckpt.resolve(root) == root / "iter_0000003"
        save_files(root, "newer")
        assert names(root) == ["iter_0000002", "iter_0000003"]
    assert ages == sorted(ages)
    assert seen == {(True, False), (False, True), (True, True)}  # before, between and after the two renames


def test_the_old_checkpoint_comes_back_when_the_new_one_was_not_whole(tmp_path):
    save(tmp_path, 3, note="old")
    (tmp_path / "iter_0000003").rename(tmp_path / ".iter_0000003.7.replaced")
    (tmp_path / ".iter_0000003.7.partial").mkdir()
    assert ckpt.read_state(ckpt.resolve(tmp_path)) == {"note": "old"}


def test_a_replacement_that_another_process_put_in_place_meanwhile_is_no_error(tmp_path, monkeypatch):
    save(tmp_path, 3, note="old")
    rename = Path.rename

    def settled_first(self, target):
        if self.name.endswith(".partial"):
            monkeypatch.undo()
            assert ckpt.resolve(tmp_path).name == "iter_0000003"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", settled_first)
    save(tmp_path, 3, note="new")
    assert ckpt.read_state(ckpt.resolve(tmp_path)) == {"note": "new"}


def test_what_could_not_be_removed_after_a_replacement_does_not_come_back(tmp_path, monkeypatch):
    save(tmp_path, 3, note="old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        save(tmp_path, 3, note="new")
        save(tmp_path, 4)
        assert list(tmp_path.glob(".iter_0000003.*.replaced"))
    ckpt.remove_older(tmp_path, 4, 1)
    assert ckpt.resolve(tmp_path) == tmp_path / "iter_0000004"
    assert ckpt.complete_iterations(tmp_path) == [4]


def test_a_checkpoint_that_cannot_be_put_back_is_told(tmp_path, monkeypatch):
    save(tmp_path, 3)
    (tmp_path / "iter_0000003").rename(tmp_path / ".iter_0000003.7.replaced")

    def read_only(self, target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    with pytest.raises(CheckpointError, match=r"iter_0000003: .*Read-only file system"):
        ckpt.resolve(tmp_path)
