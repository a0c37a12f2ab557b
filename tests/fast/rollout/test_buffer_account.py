import pytest

from miles.core.ledger import Ledger
from miles.errors import LedgerError
from miles.rollout.buffer_account import settle_buffer
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from tests.fast.rollout.support import make_args


@pytest.fixture
def started(tmp_path):
    """Three groups that went back to the data source."""
    source, ledger = RolloutDataSourceWithBuffer(make_args(tmp_path)), Ledger()
    groups = source.get_samples(3)
    for group in groups:
        ledger.start(group[0].group_index)
        ledger.interrupt(group[0].group_index)
    source.add_samples(groups)
    return source, ledger


def test_groups_that_the_data_source_holds_stay_as_they_are(started):
    source, ledger = started
    settle_buffer(ledger, source, "partial")
    assert ledger.groups("partial") == [0, 1, 2]


def test_a_group_that_left_the_buffer_is_an_error_that_names_it(started):
    source, ledger = started
    source.buffer.pop(1)
    with pytest.raises(LedgerError, match=r"groups \[1\].*lost"):
        settle_buffer(ledger, source, "partial")


def test_a_group_that_the_users_filter_threw_away_is_dropped_with_that_reason(started):
    source, ledger = started
    source.buffer.pop(1)
    settle_buffer(ledger, source, "partial", reason="buffer_filter")
    assert ledger.groups("partial") == [0, 2]
    assert ledger.dropped == {"buffer_filter": 1}
    ledger.assert_balanced()


def test_after_a_resume_groups_that_were_ready_must_be_held_too(started):
    source, ledger = started
    state = ledger.state_dict()
    state["live"]["ready"] = [state["live"]["partial"].pop()]
    resumed = Ledger()
    source.buffer.pop()
    resumed.load_state_dict(state)
    settle_buffer(resumed, source, "partial")
    with pytest.raises(LedgerError, match=r"groups \[2\]"):
        settle_buffer(resumed, source, "partial", "ready")


def test_other_data_sources_are_not_looked_into(started):
    _, ledger = started
    settle_buffer(ledger, object(), "partial")
    assert ledger.groups("partial") == [0, 1, 2]
