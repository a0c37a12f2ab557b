import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.schedule import (
    SequenceFlops,
    plan_steps,
    share_out,
    split_into_micro_batches,
    split_into_steps,
)
from miles.errors import TrainingError


def plan(lengths, *, trajectory=None, gbs=None, steps=None, ranks=1, max_tokens=64, trainable=None, **rules):
    n = len(lengths)
    return plan_steps(
        np.arange(n) if trajectory is None else np.asarray(trajectory),
        np.asarray(lengths),
        np.ones(n, bool) if trainable is None else np.asarray(trainable),
        global_batch_size=gbs,
        num_steps=steps,
        world_size=ranks,
        max_tokens=max_tokens,
        **rules,
    )


def test_steps_take_trajectories_in_order_of_appearance():
    steps = split_into_steps(np.array([7, 7, 3, 9, 3, 1]), global_batch_size=2, num_steps=None)
    assert [s.tolist() for s in steps] == [[0, 1, 2, 4], [3, 5]]


def test_without_a_batch_size_the_batch_is_cut_into_the_number_of_steps():
    assert [s.tolist() for s in split_into_steps(np.arange(6), global_batch_size=None, num_steps=3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert len(split_into_steps(np.arange(6), global_batch_size=None, num_steps=None)) == 1


@pytest.mark.parametrize(("gbs", "steps"), [(4, None), (None, 4)])
def test_trajectories_that_do_not_divide_are_refused_with_the_numbers(gbs, steps):
    with pytest.raises(TrainingError, match=r"6 trajectories.*4(.|\n)*fix: "):
        split_into_steps(np.arange(6), global_batch_size=gbs, num_steps=steps)


def test_an_empty_batch_is_refused():
    with pytest.raises(TrainingError, match="0 trajectories"):
        split_into_steps(np.arange(0), global_batch_size=None, num_steps=None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("gbs", [4, 12])
def test_every_sample_is_in_exactly_one_micro_batch_within_the_budget(ranks, gbs):
    rng = np.random.default_rng(ranks)
    lengths = rng.integers(2, 20, 24)
    trajectory = np.repeat(np.arange(12), 2)
    plans = plan(lengths, trajectory=trajectory, gbs=gbs, ranks=ranks, max_tokens=40)
    for step in plans:
        parts = [p for rank in step.micro_batches for p in rank]
        assert sorted(np.concatenate(parts).tolist()) == step.samples.tolist()
        assert len({len(rank) for rank in step.micro_batches}) == 1
        assert all(lengths[p].sum() <= 40 for p in parts)
    assert sorted(np.concatenate([s.samples for s in plans]).tolist()) == list(range(24))


# Case B43: both ranks have as many micro-batches, of real samples while there are any.
def test_light_ranks_get_real_work_and_empty_micro_batches_only_when_samples_run_out():
    (step,) = plan([8, 8, 8, 2], ranks=2, max_tokens=8)
    assert [[p.tolist() for p in rank] for rank in step.micro_batches] == [[[0], [2]], [[1], [3]]]
    (step,) = plan([2, 2, 2, 2, 2], ranks=4, max_tokens=64)
    assert sorted(len(p) for rank in step.micro_batches for p in rank) == [1, 1, 1, 2]
    (step,) = plan([8], ranks=2, max_tokens=8)
    assert [[len(p) for p in rank] for rank in step.micro_batches] == [[1], [0]]
    (step,) = plan([8], ranks=2, trainable=[False])
    assert [[len(p) for p in rank] for rank in step.micro_batches] == [[0], [0]]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from(["in turn", "tokens", "flops"]),
)
@settings(max_examples=150, deadline=None)
def test_any_step_is_split_whole_within_the_budget_and_equally_often(samples, ranks, balance):
    lengths, trajectory, trainable = (np.array(column) for column in zip(*samples, strict=True))
    costs = {"in turn": None, "tokens": lengths.astype(float), "flops": SequenceFlops(1.0, 0.5)(lengths)}
    (step,) = plan(
        lengths, trajectory=trajectory, ranks=ranks, max_tokens=32, trainable=trainable, balance_cost_B=costs[balance]
    )
    parts = [p for rank in step.micro_batches for p in rank]
    assert sorted(np.concatenate(parts).tolist()) == np.flatnonzero(trainable).tolist()
    assert len({len(rank) for rank in step.micro_batches}) == 1
    assert all(lengths[p].sum() <= 32 for p in parts)
    if trainable.sum() >= len(parts):
        assert all(len(p) for p in parts)


def test_siblings_stay_together_where_the_budget_and_the_ranks_allow():
    lengths, trajectory = np.array([9, 5, 9, 4, 4]), np.array([0, 1, 0, 1, 2])
    assert [p.tolist() for p in split_into_micro_batches(np.arange(5), lengths, 18, trajectory_B=trajectory)] == [
        [0, 2],
        [1, 3, 4],
    ]
    apart = split_into_micro_batches(np.arange(5), lengths, 17, trajectory_B=trajectory)
    assert [p.tolist() for p in apart] == [[0, 4], [2], [1, 3]]
    parts = split_into_micro_batches(np.arange(2), lengths, 18, multiple_of=2, trajectory_B=np.zeros(2, int))
    assert sorted(p.tolist() for p in parts) == [[0], [1]]


def test_ranks_run_micro_batches_of_like_cost_at_the_same_time():
    cost = np.array([1.0, 9.0, 2.0, 8.0])
    parts = [np.array([i]) for i in range(4)]
    in_turn = share_out(parts, cost, 2, balanced=False)
    assert [[cost[p].sum() for p in rank] for rank in in_turn] == [[9, 2], [8, 1]]
    balanced = share_out(parts, cost, 2, balanced=True)
    assert [[cost[p].sum() for p in rank] for rank in balanced] == [[9, 1], [8, 2]]


def test_a_long_sequence_costs_more_than_its_tokens_in_short_ones():
    flops = SequenceFlops(linear=3.0, quadratic=0.5)
    assert flops(np.array([2, 10])).tolist() == [8.0, 80.0]
    assert flops(np.array([10]))[0] > 5 * flops(np.array([2]))[0]


# Case B42.
def test_a_sample_at_the_budget_fits_and_one_above_is_refused():
    assert [p.tolist() for p in split_into_micro_batches(np.arange(1), np.array([20]), 20)] == [[0]]
    with pytest.raises(TrainingError, match=r"sample 1 .* 21 tokens.*\(20\)\n    fix: raise --max-tokens-per-gpu"):
        split_into_micro_batches(np.arange(2), np.array([3, 21]), 20)


def test_what_is_left_over_makes_a_smaller_last_step_when_that_is_allowed():
    steps = split_into_steps(np.arange(5), global_batch_size=2, num_steps=None, allow_partial=True)
    assert [s.tolist() for s in steps] == [[0, 1], [2, 3], [4]]
    with pytest.raises(TrainingError, match="--allow-partial-train-step"):
        split_into_steps(np.arange(5), global_batch_size=2, num_steps=None)


def test_dynamic_steps_are_about_equal_however_many_trajectories_there_are():
    for total, wanted in ((7, [2, 2, 3]), (6, [2, 2, 2]), (2, [1, 1])):
        steps = split_into_steps(np.arange(total), global_batch_size=None, num_steps=3, dynamic=True)
        assert sorted(map(len, steps)) == wanted
        assert np.concatenate(steps).tolist() == list(range(total))
    with pytest.raises(TrainingError, match="--use-dynamic-global-batch-size"):
        split_into_steps(np.arange(7), global_batch_size=None, num_steps=3)


@pytest.mark.parametrize("shape", ["uniform", "log-normal", "bimodal"])
def test_eight_thousand_samples_fill_the_slots_of_eight_ranks(shape):
    rng = np.random.default_rng(0)
    middle = np.where(rng.random(8192) < 0.7, 512, 6000)
    lengths = {
        "uniform": rng.integers(64, 8193, 8192),
        "log-normal": np.clip(np.exp(rng.normal(np.log(1500), 0.8, 8192)), 1, 16384).astype(int),
        "bimodal": np.clip(rng.normal(middle, middle / 4), 16, 16384).astype(int),
    }[shape]
    started = time.process_time()
    (step,) = plan(lengths, ranks=8, max_tokens=16384)
    assert time.process_time() - started < 2
    slots = sum(len(rank) for rank in step.micro_batches) * 16384
    assert lengths.sum() / slots >= 0.97


def test_samples_without_trainable_token_are_not_run():
    (step,) = plan([4, 4, 4], trainable=[True, False, True])
    assert step.samples.tolist() == [0, 1, 2]
    assert [p.tolist() for p in step.micro_batches[0]] == [[0, 2]]
