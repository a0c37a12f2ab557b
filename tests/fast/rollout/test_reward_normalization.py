import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.estimators import ESTIMATORS, group_baseline
from miles.rollout.overlong_penalty import OverlongPenalty, overlong_metrics
from miles.rollout.reward_normalization import normalize_group, normalize_rewards
from miles.rollout.train_data_conversion import to_train_batch
from tests.fast.rollout.test_train_data_conversion import make_sample

BASELINES = ["mean", "mean_std", "leave_one_out"]


def reference(rewards, baseline):
    """One group, as the papers write it."""
    n = len(rewards)
    if n == 1:
        return [0.0]
    mean = sum(rewards) / n
    if baseline == "leave_one_out":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
    return [(r - mean) / (std + 1e-6 if baseline == "mean_std" else 1.0) for r in rewards]


# Case B37.
@pytest.mark.parametrize(
    ("baseline", "right", "wrong"),
    [("mean_std", 1.2076, -0.7246), ("mean", 0.625, -0.375), ("leave_one_out", 0.7143, -0.4286)],
)
def test_golden_numbers_of_three_right_answers_of_eight(baseline, right, wrong):
    got = normalize_group([1, 1, 1, 0, 0, 0, 0, 0], baseline)
    np.testing.assert_allclose(got, [right] * 3 + [wrong] * 5, atol=5e-5)


@pytest.mark.parametrize("baseline", BASELINES)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9))
def test_every_comparison_is_the_papers(baseline, rewards):
    got = normalize_group(rewards, baseline)
    np.testing.assert_allclose(got, reference(rewards, baseline), rtol=1e-6, atol=1e-8)


# Case B01.
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.3, -7.7])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(baseline, value: float, size: int):
    rewards = np.full(size, np.float32(value))
    assert normalize_group(rewards, baseline).tolist() == [0.0] * size


# Case B03.
def test_a_small_spread_is_not_flattened_by_the_epsilon():
    rewards = np.asarray([1.0, 1.00001], dtype=np.float32)
    got = normalize_group(rewards, "mean_std")
    np.testing.assert_allclose(got, [-0.6196, 0.6196], atol=1e-4)


# Case B34.
def test_only_the_own_group_counts():
    rewards, groups = [1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2]
    got = normalize_rewards(rewards, group_B=groups, trajectory_B=range(6), baseline="mean_std")
    np.testing.assert_allclose(got, [0, 0, 0, 0, 0.7071, -0.7071], atol=1e-4)


@pytest.mark.parametrize("baseline", BASELINES)
def test_fragments_of_one_trajectory_count_once_and_share_the_result(baseline):
    got = normalize_rewards([1.0, 1.0, 1.0, 0.0], group_B=[7] * 4, trajectory_B=[0, 0, 0, 1], baseline=baseline)
    right, wrong = normalize_group([1.0, 0.0], baseline)
    assert got.tolist() == [right, right, right, wrong]


def test_fragments_that_disagree_are_an_error_with_their_rewards():
    with pytest.raises(ValueError, match=r"group 7.*trajectory 3.*\[1.0, 0.0\]"):
        normalize_rewards([1.0, 0.0], group_B=[7, 7], trajectory_B=[3, 3], baseline="mean_std")


# Case B04.
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_response_without_trainable_tokens_does_not_shift_its_siblings(baseline):
    got = normalize_rewards(
        [1.0, 0.0, 5.0],
        group_B=[0, 0, 0],
        trajectory_B=[0, 1, 2],
        counted_B=[True, True, False],
        baseline=baseline,
    )
    assert got.tolist() == [*normalize_group([1.0, 0.0], baseline), 0.0]
    alone = normalize_rewards(
        [1.0, 5.0], group_B=[0, 0], trajectory_B=[0, 1], counted_B=[True, False], baseline=baseline
    )
    assert alone.tolist() == [0.0, 0.0]


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from(BASELINES),
    st.randoms(use_true_random=False),
)
def test_the_result_of_a_sample_does_not_depend_on_order_or_on_other_groups(groups, baseline, random):
    rows = [(g, t, r) for g, rewards in enumerate(groups) for t, r in enumerate(rewards)]
    expected = {
        (g, t): x for g, rewards in enumerate(groups) for t, x in enumerate(normalize_group(rewards, baseline))
    }
    random.shuffle(rows)
    got = normalize_rewards(
        [r for *_, r in rows],
        group_B=[g for g, *_ in rows],
        trajectory_B=[10 * g + t for g, t, _ in rows],
        baseline=baseline,
    )
    np.testing.assert_allclose(got, [expected[g, t] for g, t, _ in rows], rtol=1e-6, atol=1e-9)


def test_a_run_compares_as_its_estimator_and_its_settings_say():
    def chosen(name, normalize=True, divide_std=True):
        return group_baseline(name, normalize=normalize, divide_std=divide_std)

    assert chosen("grpo") == chosen("dapo") == "mean_std"
    assert chosen("grpo", divide_std=False) == chosen("dr_grpo") == chosen("reinforce_plus_plus_baseline") == "mean"
    assert chosen("rloo", divide_std=False) == "leave_one_out"
    assert chosen("ppo") is chosen("reinforce_plus_plus") is None
    assert {chosen(name, normalize=False) for name in ESTIMATORS} == {None}


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, 0.025), (90, 0.25), (100, 0.5), (130, 0.5)]
)
def test_a_response_loses_reward_over_the_buffer_before_the_limit(length, expected):
    penalty = OverlongPenalty(max_response_len=100, buffer_len=20, factor=0.5)
    assert penalty.of(length) == pytest.approx(expected, abs=1e-12)


def test_long_responses_are_compared_with_their_penalty_and_reported_without():
    groups = [[make_sample(0, 0, 1.0, response=10), make_sample(1, 0, 1.0, response=8), make_sample(2, 0, 0.0)]]
    penalty = OverlongPenalty(max_response_len=10, buffer_len=4, factor=1.0)
    batch = to_train_batch(groups, baseline=None, overlong=penalty)
    assert batch["reward"].values.tolist() == [0.0, 0.5, 0.0]
    assert batch["raw_reward"].values.tolist() == [1.0, 1.0, 0.0]
    batch = to_train_batch(groups, baseline="mean_std", overlong=penalty)
    np.testing.assert_allclose(batch["reward"].values, normalize_group([0.0, 0.5, 0.0], "mean_std"), rtol=1e-6)


def test_a_trajectory_of_several_samples_is_as_long_as_its_longest_response():
    parts = [make_sample(i, 0, 1.0, response=n, rollout_id=5) for i, n in enumerate([10, 3])]
    penalty = OverlongPenalty(max_response_len=10, buffer_len=4, factor=1.0)
    batch = to_train_batch([[*parts, make_sample(2, 0, 0.0)]], baseline="mean", overlong=penalty)
    assert batch["reward"].values.tolist() == [0.0, 0.0, 0.0]


def test_the_mean_penalty_is_reported_over_scored_trajectories():
    parts = [make_sample(i, 0, 1.0, response=n, rollout_id=5) for i, n in enumerate([10, 3])]
    others = [make_sample(2, 0, 0.0, response=8), make_sample(3, 0, None, response=10)]
    penalty = OverlongPenalty(max_response_len=10, buffer_len=4, factor=1.0)
    assert overlong_metrics([[*parts, *others]], penalty) == {"rollout/overlong_penalty": (1.0 + 0.5) / 2}
    assert overlong_metrics([[*parts, *others]], None) == overlong_metrics([], penalty) == {}
