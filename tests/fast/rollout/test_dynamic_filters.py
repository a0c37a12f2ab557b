from types import SimpleNamespace

import pytest

from miles.core.samples import Sample
from miles.rollout.filter_hub.dynamic_sampling_filters import check_no_aborted, check_reward_nonzero_std

ARGS = SimpleNamespace(reward_key=None)


def rewarded(index, reward):
    return Sample(group_index=0, index=index, reward=reward)


def test_a_group_with_different_rewards_is_kept():
    assert check_reward_nonzero_std(ARGS, [rewarded(0, 1.0), rewarded(1, 0.0)]).keep is True


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.0])
def test_a_group_with_equal_rewards_is_dropped_with_its_reward_as_reason(value):
    verdict = check_reward_nonzero_std(ARGS, [rewarded(i, value) for i in range(7)])
    assert (verdict.keep, verdict.reason) == (False, f"zero_std_{round(value, 1)}")


def test_a_group_of_one_is_kept():
    assert check_reward_nonzero_std(ARGS, [rewarded(0, 1.0)]).keep is True


def test_fragments_of_a_trajectory_count_once():
    mixed = [[rewarded(0, 1.0), rewarded(0, 1.0)], [rewarded(1, 0.0)]]
    equal = [[rewarded(0, 1.0), rewarded(0, 1.0)], [rewarded(1, 1.0)]]
    lone = [[rewarded(0, 1.0), rewarded(0, 1.0)]]
    assert check_reward_nonzero_std(ARGS, mixed).keep is True
    assert check_reward_nonzero_std(ARGS, equal).keep is False
    assert check_reward_nonzero_std(ARGS, lone).keep is True


def test_reward_objects_are_compared_by_the_reward_key():
    group = [rewarded(0, {"score": 1.0, "length": 3}), rewarded(1, {"score": 1.0, "length": 9})]
    assert check_reward_nonzero_std(SimpleNamespace(reward_key="score"), group).keep is False
    assert check_reward_nonzero_std(SimpleNamespace(reward_key="length"), group).keep is True


def test_a_group_with_an_aborted_sample_is_dropped():
    group = [rewarded(0, 1.0), rewarded(1, 0.0)]
    assert check_no_aborted(ARGS, group).keep is True
    group[1].status = Sample.Status.ABORTED
    assert check_no_aborted(ARGS, group).reason == "group_has_aborted"
