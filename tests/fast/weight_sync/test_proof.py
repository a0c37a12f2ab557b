from dataclasses import replace

import pytest

from miles.backends.weight_sync import proof
from miles.backends.weight_sync.records import SentWeights
from miles.errors import WeightSyncError

SENT = SentWeights(
    version=3,
    nbytes={"a": 4, "b": 8},
    checksums={"a": "x1", "b": "x2"},
    expected_nbytes={"a": 4, "b": 8},
    learned=True,
    buckets=1,
    seconds=0.1,
)


def test_what_was_sent_in_full_passes():
    proof.check_sent(SENT)
    proof.check_engines(SENT, {"engine-0": {"a": "x1", "b": "x2"}})
    proof.check_changed(SENT, {"a": "x0", "b": "x2"}, SENT.checksums)


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        ({"a": 4, "b": 8, "c": 1}, "never sent: c"),
        ({"a": 4}, "sent but not in the model folder: b"),
        ({"a": 4, "b": 16}, r"of another size: b \(8 bytes sent, 16 expected\)"),
    ],
)
def test_a_parameter_missing_surplus_or_of_another_size_is_named(expected, told):
    with pytest.raises(WeightSyncError, match=told):
        proof.check_sent(replace(SENT, expected_nbytes=expected))


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ({"a": "x1", "b": "OLD"}, "engine-1 does not hold weight version 3: differing or missing: b"),
        ({"a": "x1"}, "differing or missing: b"),
        ({"a": "x1", "b": "x2", "z": "q"}, "held but never sent: z"),
    ],
)
def test_an_engine_that_holds_something_else_is_named_with_the_parameters(held, told):
    with pytest.raises(WeightSyncError, match=told):
        proof.check_engines(SENT, {"engine-0": {"a": "x1", "b": "x2"}, "engine-1": held})


def test_weights_that_did_not_change_though_something_was_learned_are_stale():
    with pytest.raises(WeightSyncError, match="exactly the weights of the update before"):
        proof.check_changed(SENT, dict(SENT.checksums), SENT.checksums)


def test_weights_may_stay_when_nothing_was_learned_or_nothing_was_sent_before():
    proof.check_changed(replace(SENT, learned=False), dict(SENT.checksums), SENT.checksums)
    proof.check_changed(SENT, {}, SENT.checksums)


def test_a_long_list_of_names_is_cut():
    names = {f"p{i:03d}": 1 for i in range(50)}
    with pytest.raises(WeightSyncError, match="and 42 more"):
        proof.check_sent(replace(SENT, nbytes={}, expected_nbytes=names))
