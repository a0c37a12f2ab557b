import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.reward_normalization import normalize_group, normalize_rewards


def test_rewards_become_distances_from_the_mean_in_unbiased_deviations():
    got = normalize_group([1.0, 0.0, 0.0, 1.0], divide_std=True)
    std = np.sqrt(4 * 0.25 / 3)
    np.testing.assert_allclose(got, np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6), rtol=1e-12)


def test_without_division_only_the_mean_is_subtracted():
    np.testing.assert_array_equal(normalize_group([3.0, 1.0], divide_std=False), [1.0, -1.0])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.3, -7.7])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_equal_rewards_give_exactly_zero(value: float, size: int):
    rewards = np.full(size, np.float32(value))
    assert normalize_group(rewards, divide_std=True).tolist() == [0.0] * size


def test_a_small_spread_is_not_flattened_by_the_epsilon():
    rewards = np.asarray([1.0, 1.00001], dtype=np.float32)
    got = normalize_group(rewards, divide_std=True)
    np.testing.assert_allclose(got, [-0.6196, 0.6196], atol=1e-4)


def test_fragments_of_one_trajectory_count_once_and_share_the_result():
    got = normalize_rewards([1.0, 1.0, 1.0, 0.0], group_B=[7, 7, 7, 7], trajectory_B=[0, 0, 0, 1], divide_std=False)
    assert got.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_fragments_that_disagree_are_an_error_with_their_rewards():
    with pytest.raises(ValueError, match=r"group 7.*trajectory 3.*\[1.0, 0.0\]"):
        normalize_rewards([1.0, 0.0], group_B=[7, 7], trajectory_B=[3, 3], divide_std=True)


def test_a_response_without_trainable_tokens_does_not_shift_its_siblings():
    got = normalize_rewards(
        [1.0, 0.0, 5.0],
        group_B=[0, 0, 0],
        trajectory_B=[0, 1, 2],
        counted_B=[True, True, False],
        divide_std=False,
    )
    assert got.tolist() == [0.5, -0.5, 0.0]
    alone = normalize_rewards(
        [1.0, 5.0], group_B=[0, 0], trajectory_B=[0, 1], counted_B=[True, False], divide_std=True
    )
    assert alone.tolist() == [0.0, 0.0]


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_result_of_a_sample_does_not_depend_on_order_or_on_other_groups(groups, divide_std, random):
    rows = [(g, t, r) for g, rewards in enumerate(groups) for t, r in enumerate(rewards)]
    expected = {
        (g, t): x
        for g, rewards in enumerate(groups)
        for t, x in enumerate(normalize_group(rewards, divide_std=divide_std))
    }
    random.shuffle(rows)
    got = normalize_rewards(
        [r for *_, r in rows],
        group_B=[g for g, *_ in rows],
        trajectory_B=[10 * g + t for g, t, _ in rows],
        divide_std=divide_std,
    )
    np.testing.assert_allclose(got, [expected[g, t] for g, t, _ in rows], rtol=1e-9, atol=1e-9)
