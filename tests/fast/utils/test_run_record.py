from pathlib import Path

import pytest

from miles.errors import CheckpointError
from miles.utils import checkpoint_folder, run_record
from miles.utils.run_record import RunRecord


def save(root: Path, iteration: int, run_id: str | None) -> Path:
    with checkpoint_folder.writing(root, iteration) as draft:
        if run_id is not None:
            run_record.write(draft, RunRecord(run_id, {"rollout": {"seed": 7}}))
    return root / checkpoint_folder.iteration_name(iteration)


def test_a_checkpoint_says_whose_it_is(tmp_path):
    assert run_record.read(save(tmp_path, 1, "mine")) == RunRecord("mine", {"rollout": {"seed": 7}})
    assert run_record.read(save(tmp_path, 2, None)) is None
    assert len({run_record.new_id() for _ in range(100)}) == 100


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 1, "id": "x"}', '{"format": 99}'])
def test_a_record_that_cannot_be_understood_is_an_error(tmp_path, text):
    (tmp_path / run_record.FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.json: (unreadable|written by another version)"):
        run_record.read(tmp_path)


# A new run beside an old one's checkpoints would later be resumed from the old one's latest.
def test_a_new_run_may_save_only_where_no_checkpoint_is(tmp_path):
    assert run_record.conflict(tmp_path, None) is None
    assert run_record.conflict(tmp_path / "absent", None) is None
    (tmp_path / ".iter_0000004.12.partial").mkdir()
    (tmp_path / "iter_0000004").mkdir()
    assert run_record.conflict(tmp_path, None) is None
    save(tmp_path, 100, None)
    told = f"{tmp_path} holds checkpoints of another run, the latest iter_0000100"
    assert run_record.conflict(tmp_path, None) == told


def test_a_resumed_run_may_save_where_it_was_loaded_from_and_among_earlier_ones_of_its_own(tmp_path):
    own, fork = tmp_path / "own", tmp_path / "fork"
    five, ten = save(own, 5, "mine"), save(own, 10, "mine")
    assert run_record.conflict(own, ten) is None
    assert run_record.conflict(own / ".." / "own", five) is None
    eight = save(fork, 8, "mine")
    assert run_record.conflict(fork, ten) is None
    assert run_record.conflict(own, eight) == (
        f"{own} holds iter_0000010 of this run, which is later than the checkpoint it is loaded from, {eight}"
    )


def test_a_resumed_run_may_not_save_among_checkpoints_of_others_even_where_it_was_loaded_from(tmp_path):
    ten = save(tmp_path / "a", 10, "mine")
    save(tmp_path / "b", 3, "theirs")
    assert "another run, the latest iter_0000003" in str(run_record.conflict(tmp_path / "b", ten))
    save(tmp_path / "a", 100, "theirs")
    assert "another run, the latest iter_0000100" in str(run_record.conflict(tmp_path / "a", ten))


def test_a_checkpoint_whose_replacement_was_cut_short_counts(tmp_path):
    save(tmp_path, 3, "theirs").rename(tmp_path / ".iter_0000003.7.replaced")
    assert "another run, the latest iter_0000003" in str(run_record.conflict(tmp_path, None))


def test_a_run_that_goes_back_is_told_of_the_later_checkpoints_it_saves_beside(tmp_path):
    five, ten = save(tmp_path, 5, "mine"), save(tmp_path, 10, "mine")
    assert str(run_record.later(tmp_path, five)).startswith(
        f"{ten} is later than the checkpoint this run goes back to"
    )
    assert run_record.later(tmp_path, ten) is None
    assert run_record.later(tmp_path / "elsewhere", five) is None
