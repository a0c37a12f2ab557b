import pytest

from miles.config.schema import RunConfig
from miles.errors import CheckpointError
from miles.launch import run_to_end
from miles.ray.start_point import Resumed, differences, epochs_in_words, resume_notes, resume_point, steps_of_epochs
from miles.utils import checkpoint_folder, run_record
from miles.utils.run_record import RunRecord


def save(root, iteration, record=None):
    with checkpoint_folder.writing(root, iteration) as draft:
        if record is not None:
            run_record.write(draft, record)
        state = {"next_step": iteration, "weight_version": iteration + 1, "rollout": {"ledger": iteration}}
        checkpoint_folder.write_state(draft, state)


# G01
def test_a_run_starts_after_the_step_that_was_saved_and_at_0_without_a_checkpoint(tmp_path):
    save(tmp_path, 11)
    save(tmp_path, 7)
    assert resume_point(str(tmp_path)) == Resumed(tmp_path / "iter_0000011", 11, 12, {"ledger": 11})
    assert resume_point(str(tmp_path / "iter_0000007")).next_step == 7
    assert resume_point(None) == Resumed(None, 0, 0, None)


# G01
def test_an_empty_folder_starts_at_0_with_a_message(tmp_path):
    start_from = resume_point(str(tmp_path))
    assert start_from == Resumed(None, 0, 0, None)
    assert resume_notes(str(tmp_path), start_from) == [
        f"{tmp_path} holds no complete checkpoint yet: starting from --hf-checkpoint at step 0"
    ]
    assert resume_notes(None, start_from) == []


# G06
def test_a_checkpoint_that_was_cut_short_is_passed_over_with_a_message(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "iter_0000020" / "trainer").mkdir(parents=True)
    start_from = resume_point(str(tmp_path))
    assert start_from.next_step == 10
    assert resume_notes(str(tmp_path), start_from) == [
        f"skipped: {tmp_path}/iter_0000020 is incomplete: it has no COMPLETE file",
        f"resuming from {tmp_path}/iter_0000010, after 10 steps",
    ]


def test_a_complete_checkpoint_without_the_state_of_the_data_is_refused(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "iter_0000010" / checkpoint_folder.STATE).unlink()
    with pytest.raises(CheckpointError, match=r"state.json: unreadable"):
        resume_point(str(tmp_path))


# G12
def test_a_run_whose_checkpoint_is_past_its_end_says_so_with_a_status_of_its_own(tmp_path, capsys):
    save(tmp_path / "checkpoints", 50)
    config = RunConfig.model_validate(
        {
            "run": {"dir": str(tmp_path / "run")},
            "rollout": {"num_rollout": 20},
            "checkpoint": {"load": str(tmp_path / "checkpoints")},
        }
    )

    async def loop(run):
        raise AssertionError("nothing is left to do")

    assert run_to_end(config, loop) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "the checkpoint is after step 50 and the run has 20: nothing is left to do" in told


def config_of(**sections):
    return RunConfig.model_validate(sections)


# Case H10.
def test_a_resumed_run_keeps_the_id_of_the_checkpoint(tmp_path):
    record = RunRecord("20260101-120000-abcd", {})
    save(tmp_path, 3, record)
    assert resume_point(str(tmp_path)).record == record


def test_settings_that_are_others_now_are_told_at_resume(tmp_path):
    before = config_of(optimizer={"lr": 1e-3}, rollout={"num_rollout": 9})
    save(tmp_path, 3, RunRecord("a", before.model_dump(mode="json")))
    now = config_of(optimizer={"lr": 1e-2}, rollout={"num_rollout": 20})
    start_from = resume_point(str(tmp_path))
    assert differences(before, tmp_path, start_from) == []
    assert differences(now, tmp_path, start_from) == ["changed since the checkpoint: --lr is 0.01, was 0.001"]
    assert differences(now, tmp_path, resume_point(None)) == []


def test_going_back_beside_later_checkpoints_is_told_when_the_run_saves(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, 3)
    save(folder, 5)
    start_from = resume_point(str(folder / "iter_0000003"))
    (told,) = differences(config_of(checkpoint={"save_interval": 1}), tmp_path, start_from)
    assert told.startswith(f"{folder}/iter_0000005 is later than the checkpoint this run goes back to")
    assert differences(config_of(), tmp_path, start_from) == []
    elsewhere = config_of(checkpoint={"save_interval": 1, "save": str(tmp_path / "new")})
    assert differences(elsewhere, tmp_path, start_from) == []


@pytest.mark.parametrize(
    ("epochs", "prompts", "told"),
    [
        (3, 100, "3 epochs of 100 prompts, 32 a step, are 9 steps; they take 288 of the 300 prompts"),
        (1, 64, "1 epoch of 64 prompts, 32 a step, are 2 steps"),
    ],
)
def test_how_epochs_became_steps_is_told_with_the_prompts_left_over(epochs, prompts, told):
    config = config_of(rollout={"num_epoch": epochs, "batch_size": 32})
    assert epochs_in_words(config, prompts, steps_of_epochs(config, prompts)) == told
