import asyncio
from types import SimpleNamespace

import pytest

from miles.core.samples import Sample
from miles.errors import HookError
from miles.rollout.filter_hub.base_types import DynamicFilterOutput, DynamicFilters, call_dynamic_filter
from miles.rollout.filter_hub.dynamic_sampling_filters import (
    check_no_aborted,
    check_response_length,
    check_reward_nonzero_std,
)

ARGS = SimpleNamespace(reward_key=None, filter_max_response_len=None)
HUB = "miles.rollout.filter_hub.dynamic_sampling_filters"


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
    # Case E01.
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


def test_trajectories_without_a_reward_do_not_count():
    # Case E16.
    drop = lambda *rewards: check_reward_nonzero_std(ARGS, [rewarded(i, r) for i, r in enumerate(rewards)])  # noqa: E731
    assert drop(1.0, None, 0.0).keep is True
    assert drop(1.0, None, 1.0).reason == "zero_std_1.0"
    assert drop(None, None).reason == "unscored"
    assert drop(None).reason == "unscored"
    assert drop(1.0, None).reason == "one_scored"


def lengths(*entries):
    """A group of trajectories; each entry is a length, negative when it was cut off, or a list of fragments' lengths."""

    def fragment(index, length):
        status = Sample.Status.TRUNCATED if length < 0 else Sample.Status.COMPLETED
        return Sample(group_index=0, index=index, response_length=abs(length), status=status)

    return [
        [fragment(i, n) for n in entry] if isinstance(entry, list) else fragment(i, entry)
        for i, entry in enumerate(entries)
    ]


@pytest.mark.parametrize(
    ("group", "limit", "reason"),
    [
        (lengths(-8, -8), None, "all_truncated"),
        (lengths(-8, 3), None, None),
        (lengths(-8), None, "all_truncated"),
        (lengths(8), None, None),
        (lengths(8, 9), 7, "all_too_long"),
        (lengths(8, 7), 7, None),
        (lengths(8, -3), 7, "all_too_long"),
        (lengths(-8, -8), 7, "all_truncated"),
        (lengths([3, -8], [-2]), None, "all_truncated"),
        (lengths([3, -8], [3, 4]), None, None),
        (lengths([3, 8], [9]), 7, "all_too_long"),
        (lengths([3, 4, 5]), 7, None),
    ],
)
def test_groups_of_which_nothing_came_to_its_end_in_time_are_dropped(group, limit, reason):
    args = SimpleNamespace(filter_max_response_len=limit)
    verdict = check_response_length(args, group)
    assert (verdict.keep, verdict.reason) == (reason is None, reason)


def keeps_all(args, group, **_):
    return True


def drops_without_a_reason(args, group, **_):
    return DynamicFilterOutput(keep=False)


async def drops_by_hand(args, group, **_):
    return DynamicFilterOutput(keep=False, reason="by_hand")


def judge(*paths, group):
    return asyncio.run(DynamicFilters(paths).judge(ARGS, group))


def test_of_several_filters_the_first_that_drops_a_group_names_the_reason():
    equal, mixed = [rewarded(0, 1.0), rewarded(1, 1.0)], [rewarded(0, 1.0), rewarded(1, 0.0)]
    std, length, by_hand = (
        f"{HUB}.check_reward_nonzero_std",
        f"{HUB}.check_response_length",
        f"{__name__}.drops_by_hand",
    )
    assert judge(group=equal).keep
    assert judge(std, length, group=mixed).keep
    assert judge(std, by_hand, group=equal).reason == "zero_std_1.0"
    assert judge(by_hand, std, group=equal).reason == "by_hand"
    assert judge(f"{__name__}.keeps_all", by_hand, group=mixed).reason == "by_hand"
    assert judge(f"{__name__}.drops_without_a_reason", group=mixed).reason == "filtered"


def test_a_filter_that_does_not_exist_is_named_when_filters_are_loaded():
    with pytest.raises(HookError, match="check_rewards_nonzero"):
        DynamicFilters([f"{HUB}.check_rewards_nonzero"])


@pytest.mark.parametrize("returned", ["drop", 0, [], None, DynamicFilterOutput(keep="no")])
def test_a_filter_that_returns_neither_true_nor_false_is_an_error(returned):
    with pytest.raises(HookError, match=r"my\.filter: the dynamic filter returned .*\n    fix: return"):
        asyncio.run(call_dynamic_filter(lambda args, group: returned, "my.filter", ARGS, [rewarded(0, 1.0)]))


def test_a_filter_that_raises_is_named_with_its_line():
    with pytest.raises(HookError, match=r"the dynamic filter raised KeyError: 'x'\n    at .*\{\}\[\"x\"\]"):
        asyncio.run(call_dynamic_filter(lambda args, group: {}["x"], "my.filter", ARGS, [rewarded(0, 1.0)]))
