import copy

import numpy as np
import pytest

from miles.core.samples import Sample
from miles.errors import HookError, TrainingError
from miles.rollout.overlong_penalty import OverlongPenalty
from miles.rollout.train_data_conversion import to_train_batch


def make_sample(index, group, reward=0.0, response=2, **fields):
    sample = Sample(group_index=group, index=index, tokens=[5, 6])
    sample.append_response([7] * response, [-0.25] * response, "r", "3")
    sample.status = Sample.Status.COMPLETED
    sample.reward = reward
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def two_groups():
    return [
        [make_sample(0, 0, 1.0), make_sample(1, 0, 0.0, response=3)],
        [make_sample(2, 1, 1.0), make_sample(3, 1, 1.0, response=1)],
    ]


def test_every_column_has_its_axis_dtype_and_values():
    batch = to_train_batch(two_groups())
    found = {name: (c.axis, c.dtype, len(c)) for name, c in batch.all_columns()}
    assert found == {
        "tokens": ("token", "int64", 4),
        "loss_mask": ("response", "float32", 4),
        "rollout_log_probs": ("response", "float32", 4),
        "reward": ("sample", "float32", 4),
        "raw_reward": ("sample", "float32", 4),
        "sample_index": ("sample", "int64", 4),
        "group_index": ("sample", "int64", 4),
        "trajectory": ("sample", "int64", 4),
        "truncated": ("sample", "float32", 4),
        "weight_version": ("sample", "int64", 4),
    }
    assert batch["tokens"].row(1).tolist() == [5, 6, 7, 7, 7]
    assert batch["raw_reward"].values.tolist() == [1.0, 0.0, 1.0, 1.0]
    np.testing.assert_allclose(batch["reward"].values, [0.7071, -0.7071, 0, 0], atol=1e-4)
    assert batch["weight_version"].values.tolist() == [3, 3, 3, 3]
    assert batch["group_index"].values.tolist() == [0, 0, 1, 1]


def test_a_removed_sample_has_no_weight_but_still_counts_in_its_group():
    groups = two_groups()
    groups[0][0].remove_sample = True
    batch = to_train_batch(groups, baseline="mean")
    assert batch["loss_mask"].row(0).tolist() == [0.0, 0.0]
    assert batch["reward"].values.tolist()[:2] == [0.5, -0.5]


def test_a_fully_masked_response_does_not_count_in_its_group():
    groups = [[make_sample(0, 0, 1.0), make_sample(1, 0, 0.0), make_sample(2, 0, 5.0, loss_mask=[0, 0])]]
    assert to_train_batch(groups, baseline="mean")["reward"].values.tolist() == [0.5, -0.5, 0.0]


def test_rewards_of_any_number_type_become_floats():
    rewards = [1, True, np.float32(0.5), {"score": 1.0}]
    group = [make_sample(i, 0, r) for i, r in enumerate(rewards)]
    batch = to_train_batch([group], reward_key="score", baseline=None)
    assert batch["reward"].values.tolist() == [1.0, 1.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "sample 1 of group 0.*nan"),
        (float("inf"), "sample 1 of group 0.*inf"),
        ("good", "sample 1 of group 0.*'good'"),
        ({"score": 1.0}, "sample 1 of group 0.*--reward-key"),
    ],
)
def test_an_unusable_reward_stops_with_the_sample_named(reward, message):
    with pytest.raises(TrainingError, match=message):
        to_train_batch([[make_sample(0, 0, 1.0), make_sample(1, 0, reward)]])


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_broken_log_prob_stops_with_the_sample_named(bad):
    groups = two_groups()
    groups[1][0].rollout_log_probs = [-1.0, bad]
    with pytest.raises(TrainingError, match=r"sample 2 \(group 1\).*response token 1"):
        to_train_batch(groups)


def test_log_probs_of_only_some_samples_are_an_error_that_names_the_others():
    groups = two_groups()
    groups[0][1].rollout_log_probs = None
    with pytest.raises(TrainingError, match=r"1 of 4 samples have no rollout_log_probs: sample 1 \(group 0\)"):
        to_train_batch(groups)


def test_without_any_log_probs_the_column_is_left_out():
    groups = two_groups()
    for sample in (s for g in groups for s in g):
        sample.rollout_log_probs = None
    assert "rollout_log_probs" not in to_train_batch(groups)


def test_an_empty_response_without_log_probs_does_not_count_as_missing_them():
    groups = [[make_sample(0, 0, 1.0), Sample(group_index=0, index=1, tokens=[5, 6], reward=0.0)]]
    batch = to_train_batch(groups)
    assert batch["rollout_log_probs"].lengths().tolist() == [2, 0]
    assert batch["weight_version"].values.tolist() == [3, -1]


def test_lengths_that_disagree_name_the_sample():
    groups = two_groups()
    groups[0][0].loss_mask = [1]
    with pytest.raises(TrainingError, match=r"sample 0 \(group 0\): 1 entries of loss_mask but 2"):
        to_train_batch(groups)


def test_fragments_of_one_trajectory_keep_their_trajectory_and_share_the_reward():
    first = make_sample(0, 0, 1.0, rollout_id=0)
    second = copy.deepcopy(first)
    batch = to_train_batch([[[first, second], make_sample(1, 0, 0.0)]], baseline="mean")
    assert batch["trajectory"].values.tolist() == [0, 0, 1]
    assert batch["reward"].values.tolist() == [0.5, 0.5, -0.5]


def test_trajectory_names_need_to_differ_within_their_group_only():
    unnumbered = [[make_sample(None, None), make_sample(None, None)] for _ in range(2)]
    assert to_train_batch(unnumbered)["trajectory"].values.tolist() == [0, 1, 2, 3]
    named_alike = [[make_sample(0, 0, rollout_id=0)], [make_sample(1, 1, rollout_id=0)]]
    assert to_train_batch(named_alike)["trajectory"].values.tolist() == [0, 1]


def test_a_nested_list_is_one_trajectory_also_when_its_samples_have_numbers_of_their_own():
    group = [[make_sample(0, 0, 1.0), make_sample(1, 0, 1.0)], make_sample(2, 0, 0.0)]
    batch = to_train_batch([group], baseline="mean")
    assert batch["trajectory"].values.tolist() == [0, 0, 1]
    assert batch["reward"].values.tolist() == [0.5, 0.5, -0.5]


def test_fragments_with_different_rewards_are_an_error():
    fragments = [make_sample(0, 0, 1.0, rollout_id=0), make_sample(0, 0, 0.0, rollout_id=0)]
    with pytest.raises(TrainingError, match="form one trajectory but have the rewards"):
        to_train_batch([[fragments]])


def test_a_group_that_mixes_prompts_is_an_error():
    with pytest.raises(TrainingError, match="one group holds samples of the groups"):
        to_train_batch([[make_sample(0, 0), make_sample(1, 1)]])


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_splitting_over_ranks_changes_neither_group_sizes_nor_rewards(dp):
    groups = [[make_sample(2 * g + i, g, float(i)) for i in range(2)] for g in range(4)]
    batch = to_train_batch(groups)
    shards = [batch.select(range(rank, len(batch), dp)) for rank in range(dp)]
    seen = sorted(
        (int(i), int(g), float(r))
        for shard in shards
        for i, g, r in zip(
            shard["sample_index"].values, shard["group_index"].values, shard["reward"].values, strict=True
        )
    )
    assert [g for _, g, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_allclose([r for *_, r in seen], [-0.7071, 0.7071] * 4, atol=1e-4)


def test_the_post_process_hook_replaces_the_normalisation():
    batch = to_train_batch(two_groups(), reward_post_process=lambda samples: ([2.0] * 4, [9.0, 8.0, 7.0, 6.0]))
    assert batch["raw_reward"].values.tolist() == [2.0] * 4
    assert batch["reward"].values.tolist() == [9.0, 8.0, 7.0, 6.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [(([1.0], [1.0] * 4), "returned 1 raw rewards for 4 samples"), (None, "returned None")],
)
def test_a_post_process_hook_that_returns_nonsense_is_named(returned, message):
    with pytest.raises(HookError, match=f"my.hook: .*{message}"):
        to_train_batch(two_groups(), reward_post_process=lambda samples: returned, reward_post_process_path="my.hook")


def test_raw_reward_of_the_metadata_is_reported_but_not_trained_on():
    groups = two_groups()
    groups[0][0].metadata["raw_reward"] = 0.3
    batch = to_train_batch(groups, baseline=None)
    assert batch["raw_reward"].values.tolist()[0] == pytest.approx(0.3)
    assert batch["reward"].values.tolist()[0] == 1.0


@pytest.mark.parametrize("value", ["high", float("inf"), [1.0]])
def test_a_raw_reward_that_is_no_number_names_the_sample(value):
    groups = two_groups()
    groups[0][1].metadata["raw_reward"] = value
    with pytest.raises(TrainingError, match=r'sample 1 \(group 0\): metadata\["raw_reward"\] is'):
        to_train_batch(groups)


def test_a_raw_reward_of_none_moves_no_mean():
    groups = two_groups()
    groups[0][1].metadata["raw_reward"] = None
    batch = to_train_batch(groups)
    assert batch["raw_reward"].values.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert batch["loss_mask"].row(1).tolist() == [1.0, 1.0, 1.0]


def test_supervised_samples_need_no_reward():
    groups = [[make_sample(0, 0, None), make_sample(1, 0, None)]]
    batch = to_train_batch(groups, require_rewards=False)
    assert "reward" not in batch
    with pytest.raises(TrainingError, match="none of the 2 samples has a reward"):
        to_train_batch(groups)


@pytest.mark.parametrize("baseline", ["mean_std", "mean", "leave_one_out", None])
def test_a_sample_without_a_reward_is_not_trained_on_and_moves_no_mean(baseline):
    # Cases E12, E16.
    scored = [make_sample(0, 0, 1.0), make_sample(1, 0, 0.0), make_sample(2, 0, 0.0)]
    alone = to_train_batch([copy.deepcopy(scored)], baseline=baseline)
    batch = to_train_batch([[*scored, make_sample(3, 0, None)]], baseline=baseline)
    assert batch["reward"].values.tolist()[:3] == alone["reward"].values.tolist()
    assert batch["reward"].values.tolist()[3] == 0.0
    assert batch["loss_mask"].row(3).tolist() == [0.0, 0.0]
    assert batch["loss_mask"].row(0).tolist() == [1.0, 1.0]
    assert batch["raw_reward"].values.mean() == pytest.approx(alone["raw_reward"].values.mean())


def test_an_entry_of_a_reward_object_may_be_none_and_one_that_is_missing_is_an_error():
    # Case E16.
    group = [make_sample(0, 0, {"score": 1.0}), make_sample(1, 0, {"score": 0.0}), make_sample(2, 0, {"score": None})]
    assert to_train_batch([group], reward_key="score")["loss_mask"].row(2).tolist() == [0.0, 0.0]
    with pytest.raises(TrainingError, match=r"sample 0 of group 0: the reward object has no 'acc'"):
        to_train_batch([group], reward_key="acc")


def test_siblings_of_which_only_some_are_scored_are_an_error_that_names_them():
    fragments = [make_sample(0, 0, 1.0, rollout_id=0), make_sample(1, 0, None, rollout_id=0)]
    with pytest.raises(TrainingError, match=r"samples \[0, 1\] of group 0 form one trajectory .* \[1\.0, None\]"):
        to_train_batch([fragments])


def test_an_unscored_sample_loses_nothing_for_its_length():
    group = [make_sample(0, 0, 1.0), make_sample(1, 0, 0.0), make_sample(2, 0, None, response=8)]
    penalty = OverlongPenalty(max_response_len=8, buffer_len=4, factor=1.0)
    batch = to_train_batch([group], baseline="mean", overlong=penalty)
    assert batch["reward"].values.tolist() == [0.5, -0.5, 0.0]


def test_notes_for_the_trainers_hooks_are_a_column_when_any_sample_has_one():
    groups = two_groups()
    assert "metadata" not in to_train_batch(groups)
    groups[1][0].train_metadata = {"difficulty": 3}
    column = to_train_batch(groups)["metadata"]
    assert (column.axis, list(column.rows())) == ("opaque", [{}, {}, {"difficulty": 3}, {}])


def test_an_empty_rollout_is_an_error():
    with pytest.raises(TrainingError, match="no sample"):
        to_train_batch([])


def test_a_post_process_hook_that_raises_is_named_with_its_line():
    with pytest.raises(HookError, match=r"my\.hook: raised ZeroDivisionError.*\n    at .*1 // 0"):
        to_train_batch(two_groups(), reward_post_process=lambda s: 1 // 0, reward_post_process_path="my.hook")
