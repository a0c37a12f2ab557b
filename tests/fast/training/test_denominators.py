import numpy as np
import pytest

from miles.backends.training_utils.loss import build_denominator
from miles.backends.training_utils.loss_hub.denominators import Denominator
from miles.config.schema import AlgorithmConfig


def weights(lengths, masks=None, trajectory=None, steps=None, per_token=False, kind=None, constant=1.0, group=None):
    sample_of_R = np.repeat(np.arange(len(lengths)), lengths)
    mask_R = np.ones(sum(lengths), np.float32) if masks is None else np.concatenate(masks).astype(np.float32)
    trajectory_B = np.arange(len(lengths)) if trajectory is None else np.asarray(trajectory)
    steps = [np.arange(len(lengths))] if steps is None else [np.asarray(s) for s in steps]
    denominator = Denominator(kind=kind or ("tokens" if per_token else "trajectories"), constant=constant)
    group_B = None if group is None else np.asarray(group)
    return denominator.token_weights(mask_R, sample_of_R, trajectory_B, steps, group_B=group_B)


# Case B18.
def test_trajectories_weigh_alike_whatever_their_length():
    w = weights([1, 3])
    np.testing.assert_allclose(w, [1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert float((w * np.array([-1, 1, 1, 1])).sum()) == pytest.approx(0, abs=1e-7)


def test_tokens_weigh_alike_when_asked():
    w = weights([1, 3], per_token=True)
    assert float((w * np.array([-1, 1, 1, 1])).sum()) == pytest.approx(0.5)


def test_a_trajectory_split_into_siblings_weighs_the_same():
    whole = weights([5, 2])
    split = weights([2, 3, 2], trajectory=[0, 0, 1])
    np.testing.assert_array_equal(whole, split)


# Case B12, the weights of what is left.
def test_masked_tokens_leave_the_denominator():
    w = weights([5], masks=[[1, 0, 1, 0, 0]])
    np.testing.assert_allclose(w, [0.5, 0, 0.5, 0, 0])
    assert float((w * np.array([1.105, 9, 1.350, 9, 9])).sum()) == pytest.approx(1.2275)


# Case B21.
def test_a_trajectory_without_trainable_token_is_not_counted():
    w = weights([1, 2], masks=[[1], [0, 0]])
    assert float((w * np.array([2.0, 7.0, 7.0])).sum()) == pytest.approx(2.0)


def test_nothing_to_train_on_gives_zeros_and_no_nan():
    for per_token in (False, True):
        assert weights([2, 1], masks=[[0, 0], [0]], per_token=per_token).tolist() == [0, 0, 0]


def test_each_optimizer_step_has_its_own_denominator():
    w = weights([1, 1, 2, 4], steps=[[0, 1], [2, 3]])
    np.testing.assert_allclose(w, [0.5, 0.5, 0.25, 0.25, *[0.125] * 4])
    w = weights([1, 1, 2, 4], steps=[[0, 1], [2, 3]], per_token=True)
    np.testing.assert_allclose(w, [0.5, 0.5, *[1 / 6] * 6], rtol=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_weights_of_a_step_add_up_to_one(per_token):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 12).tolist()
    masks = [rng.integers(0, 2, n) for n in lengths]
    w = weights(lengths, masks, rng.integers(0, 6, 12).tolist(), per_token=per_token)
    assert float(w.sum()) == pytest.approx(1, abs=1e-6)


def test_samples_outside_every_step_weigh_nothing():
    assert weights([2, 2], steps=[[1]]).tolist() == [0, 0, 0.5, 0.5]


def test_prompts_weigh_alike_and_their_tokens_within_them():
    w = weights([1, 3, 2], kind="prompts", group=[7, 7, 9])
    np.testing.assert_allclose(w, [1 / 8, *[1 / 8] * 3, 1 / 4, 1 / 4])


def test_sequences_count_samples_of_a_trajectory_apart():
    w = weights([1, 3, 2], kind="sequences", trajectory=[0, 0, 1])
    np.testing.assert_allclose(w, [1 / 3, *[1 / 9] * 3, 1 / 6, 1 / 6])
    w = weights([1, 3, 2], kind="trajectories", trajectory=[0, 0, 1])
    np.testing.assert_allclose(w, [*[1 / 8] * 4, 1 / 4, 1 / 4])


def test_a_constant_divides_the_sums_of_trajectories_whatever_their_length():
    w = weights([1, 3, 2], kind="constant", constant=10.0, trajectory=[0, 0, 1])
    np.testing.assert_allclose(w, [1 / 20] * 6)
    w = weights([2, 2], masks=[[1, 0], [0, 0]], kind="constant", constant=10.0)
    np.testing.assert_allclose(w, [1 / 10, 0, 0, 0])


# Case B33.
@pytest.mark.parametrize("kind", ["tokens", "constant"])
def test_weights_do_not_depend_on_the_order_of_samples(kind):
    one, other = weights([1, 1, 4, 4], kind=kind), weights([1, 4, 1, 4], kind=kind)
    np.testing.assert_array_equal(one[[0, 2, 3, 4, 5, 1, 6, 7, 8, 9]], other)


def test_prompts_in_two_optimizer_steps_are_counted_in_each():
    w = weights([1, 1, 2], kind="prompts", group=[5, 5, 5], steps=[[0], [1, 2]])
    np.testing.assert_allclose(w, [1, 1 / 3, 1 / 3, 1 / 3])


def test_prompts_cannot_be_counted_without_knowing_them():
    with pytest.raises(ValueError, match="prompt group"):
        weights([1, 1], kind="prompts")


@pytest.mark.parametrize(
    ("settings", "kind", "constant"),
    [
        ({}, "trajectories", 100),
        ({"calculate_per_token_loss": True}, "tokens", 100),
        ({"advantage_estimator": "dapo"}, "tokens", 100),
        ({"advantage_estimator": "dr_grpo"}, "constant", 100),
        ({"advantage_estimator": "dr_grpo", "loss_constant": 30}, "constant", 30),
        ({"advantage_estimator": "dr_grpo", "loss_denominator": "prompts"}, "prompts", 100),
        ({"advantage_estimator": "dapo", "loss_type": "sft_loss"}, "trajectories", 100),
    ],
)
def test_settings_choose_the_denominator_and_an_estimator_may_bring_its_own(settings, kind, constant):
    found = build_denominator(AlgorithmConfig(**settings), max_response_len=100)
    assert found == Denominator(kind=kind, constant=constant)
