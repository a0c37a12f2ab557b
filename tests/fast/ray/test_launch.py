import pytest
from ray.exceptions import RayActorError, RayTaskError

from miles.errors import ConfigError, HookError, Issue, LedgerError
from miles.ray.failure_text import message_of
from miles.ray.start_point import steps_left

TRACE = "Traceback (most recent call last):\n  File ..."


def from_a_worker(error):
    """As it comes out of a call of an actor."""
    return RayTaskError("RolloutManager.start", TRACE, error).as_instanceof_cause()


def test_an_error_of_another_process_is_told_by_its_own_words():
    for error in (ConfigError([Issue("a.b", "is odd", "mend it")]), HookError("my.reward", "raised KeyError", "mend")):
        wrapped = from_a_worker(error)
        assert isinstance(wrapped, type(error))
        assert message_of(wrapped) == str(error)


def test_other_errors_are_told_with_their_kind_and_notes_are_not_left_out():
    assert message_of(from_a_worker(KeyError("x"))) == "KeyError: 'x'"
    error = LedgerError("lost")
    error.add_note("and more")
    assert message_of(error) == "lost\n    and more"


def test_a_process_that_died_is_named_in_one_line_with_what_to_read():
    text = "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainActor\n\tactor_id: 0a\n\tpid: 71\n"
    told = message_of(RayActorError(error_msg=text))
    assert told.startswith("TrainActor (process 71) died")
    assert "log" in told


def test_a_run_that_goes_on_has_the_steps_that_are_left():
    assert steps_left(0, 3) == range(3)
    assert steps_left(2, 3) == range(2, 3)


@pytest.mark.parametrize("next_step", [3, 5])
def test_a_checkpoint_at_the_end_of_the_run_is_told_and_not_a_run_without_a_step(next_step):
    with pytest.raises(ConfigError, match=f"after step {next_step} and the run has 3.*\n.*raise --num-rollout"):
        steps_left(next_step, 3)
