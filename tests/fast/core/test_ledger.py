import json
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core.ledger import LIVE_STATES, Ledger
from miles.errors import CheckpointError, LedgerError


def test_a_group_goes_from_issued_to_trained():
    ledger = Ledger()
    ledger.issue(0)
    assert ledger.state_of(0) == "in_flight"
    ledger.finish(0)
    assert ledger.state_of(0) == "ready"
    ledger.lease([0])
    assert ledger.state_of(0) == "leased"
    ledger.train([0])
    assert ledger.state_of(0) is None
    assert (ledger.issued, ledger.trained, ledger.newest) == (1, 1, 0)
    ledger.assert_balanced()


def test_an_interrupted_group_comes_back():
    ledger = Ledger()
    ledger.start(4)
    ledger.interrupt(4)
    assert ledger.groups("partial") == [4]
    ledger.start(4)
    assert ledger.groups("in_flight") == [4]
    assert ledger.issued == 1


def test_numbers_of_new_groups_rise():
    ledger = Ledger()
    ledger.issue(3)
    with pytest.raises(LedgerError, match="group 2 is issued after group 3"):
        ledger.issue(2)
    ledger.drop(3, "zero_std")
    with pytest.raises(LedgerError, match="final already"):
        ledger.start(3)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda ledger: ledger.train([0]), "group 0 cannot become trained: it is in_flight now"),
        (lambda ledger: ledger.lease([0]), "group 0 cannot become leased: it is in_flight now"),
        (lambda ledger: ledger.finish(1), "group 1 cannot become ready: it is ready now"),
        (lambda ledger: ledger.fail(1, "HookError"), "only groups that are in_flight or partial can"),
        (lambda ledger: ledger.interrupt(2), "group 2 cannot become partial: it is final already"),
        (lambda ledger: ledger.lease([1, 1]), "groups [1] are listed twice"),
        (lambda ledger: ledger.drop(9, "x"), "group 9 cannot become dropped: it is not issued"),
    ],
)
def test_a_transition_that_does_not_exist_is_refused_and_changes_nothing(move, message):
    ledger = Ledger()
    for group in range(3):
        ledger.issue(group)
    ledger.finish(1)
    ledger.drop(2, "zero_std")
    before = ledger.state_dict()
    with pytest.raises(LedgerError, match=re.escape(message)):
        move(ledger)
    assert ledger.state_dict() == before


def test_a_lease_is_all_or_nothing():
    ledger = Ledger()
    ledger.issue(0)
    ledger.issue(1)
    ledger.finish(0)
    with pytest.raises(LedgerError):
        ledger.lease([0, 1])
    assert ledger.groups("leased") == []


def test_metrics_count_by_state_and_reason():
    ledger = Ledger()
    for group in range(5):
        ledger.issue(group)
    ledger.drop(0, "zero_std_1.0")
    ledger.drop(1, "zero_std_0.0")
    ledger.fail(2, "HookError")
    ledger.finish(3)
    assert ledger.metrics() == {
        "ledger/issued": 5,
        "ledger/in_flight": 1,
        "ledger/partial": 0,
        "ledger/ready": 1,
        "ledger/leased": 0,
        "ledger/trained": 0,
        "ledger/dropped": 2,
        "ledger/failed": 1,
        "ledger/dropped/zero_std_0.0": 1,
        "ledger/dropped/zero_std_1.0": 1,
        "ledger/failed/HookError": 1,
    }


def test_resume_makes_leased_ready_and_in_flight_partial():
    ledger = Ledger()
    for group in range(5):
        ledger.issue(group)
    ledger.interrupt(1)
    for group in (2, 3, 4):
        ledger.finish(group)
    ledger.lease([3, 4])
    ledger.train([4])
    resumed = Ledger()
    assert resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict()))) == [0, 1, 2, 3]
    assert resumed.groups("partial") == [0, 1]
    assert resumed.groups("ready") == [2, 3]
    assert (resumed.issued, resumed.trained, resumed.newest) == (5, 1, 4)
    resumed.start(0)
    resumed.start(3)
    resumed.issue(5)
    resumed.assert_balanced()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2; this Miles reads 1"),
        ({"issued": 7}, "7 groups were issued but 2 are accounted for"),
        ({"live": {"in_flight": [0], "partial": [0], "ready": [], "leased": []}}, "group 0 is in two states"),
        ({"live": {"in_flight": [8], "partial": [], "ready": [], "leased": [1]}}, "the newest group issued is 1"),
        ({"trained": None}, "damaged"),
        ({"dropped": []}, "damaged"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, message):
    ledger = Ledger()
    ledger.issue(0)
    ledger.issue(1)
    state = ledger.state_dict()
    other = Ledger()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        other.load_state_dict(state | change)
    assert other.state_dict() == Ledger().state_dict()


def test_a_lost_group_is_found():
    ledger = Ledger()
    ledger.issue(0)
    ledger._live.clear()
    with pytest.raises(LedgerError, match="1 groups were issued but 0 are accounted for"):
        ledger.assert_balanced()


MOVES = ["issue", "resume", "interrupt", "finish", "lease", "release", "train", "drop", "fail", "restart"]
MODEL = {
    "resume": (("partial", "ready"), "in_flight"),
    "interrupt": (("in_flight",), "partial"),
    "finish": (("in_flight",), "ready"),
    "lease": (("ready",), "leased"),
    "release": (("leased",), "ready"),
    "train": (("leased",), "trained"),
    "drop": (LIVE_STATES, "dropped"),
    "fail": (("in_flight", "partial"), "failed"),
}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 9)), max_size=60))
def test_every_group_is_in_exactly_one_state_under_any_schedule(schedule):
    ledger, model = Ledger(), {}
    for move, pick in schedule:
        group = pick % len(model) if model else 0
        if move == "issue":
            group = len(model)
            ledger.issue(group)
            model[group] = "in_flight"
        elif move == "restart":
            fresh = Ledger()
            held = fresh.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
            ledger = fresh
            model = {g: {"leased": "ready", "in_flight": "partial"}.get(s, s) for g, s in model.items()}
            assert held == [g for g, s in model.items() if s in LIVE_STATES]
        else:
            allowed, to = MODEL[move]
            arguments = {"drop": (group, "reason"), "fail": (group, "error")}.get(move, (group,))
            if move in ("lease", "release", "train"):
                arguments = ([group],)
            if model.get(group) in allowed:
                getattr(ledger, move)(*arguments)
                model[group] = to
            else:
                with pytest.raises(LedgerError):
                    getattr(ledger, move)(*arguments)
        ledger.assert_balanced()
        counts = Counter(model.values())
        numbers = ledger.metrics()
        assert numbers["ledger/issued"] == len(model)
        for state in (*LIVE_STATES, "trained", "dropped", "failed"):
            assert numbers[f"ledger/{state}"] == counts[state]
        for state in LIVE_STATES:
            assert ledger.groups(state) == [g for g, s in model.items() if s == state]
