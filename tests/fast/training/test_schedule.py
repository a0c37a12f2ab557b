import numpy as np
import pytest

from miles.backends.training_utils.schedule import (
    plan_steps,
    split_into_micro_batches,
    split_into_steps,
    split_over_ranks,
)
from miles.errors import TrainingError


def plan(lengths, *, trajectory=None, gbs=None, steps=None, ranks=1, max_tokens=64, trainable=None):
    n = len(lengths)
    return plan_steps(
        np.arange(n) if trajectory is None else np.asarray(trajectory),
        np.asarray(lengths),
        np.ones(n, bool) if trainable is None else np.asarray(trainable),
        global_batch_size=gbs,
        num_steps=steps,
        world_size=ranks,
        max_tokens=max_tokens,
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
        assert all(len(p) * lengths[p].max() <= 40 for p in parts if len(p))
    assert sorted(np.concatenate([s.samples for s in plans]).tolist()) == list(range(24))


def test_ranks_with_less_work_get_empty_micro_batches():
    (step,) = plan([8, 8, 8, 2], ranks=2, max_tokens=8)
    assert [len(rank) for rank in step.micro_batches] == [2, 2]
    (step,) = plan([8], ranks=2, max_tokens=8)
    assert [[len(p) for p in rank] for rank in step.micro_batches] == [[1], [0]]


def test_siblings_stay_on_one_rank_and_ranks_get_about_equal_tokens():
    lengths = np.array([9, 9, 5, 5, 4, 4])
    ranks = split_over_ranks(np.arange(6), np.array([0, 0, 1, 1, 2, 2]), lengths, 2)
    assert [r.tolist() for r in ranks] == [[0, 1], [2, 3, 4, 5]]


def test_a_sample_at_the_budget_fits_and_one_above_is_refused():
    assert [p.tolist() for p in split_into_micro_batches(np.arange(1), np.array([20]), 20)] == [[0]]
    with pytest.raises(TrainingError, match=r"21 tokens.*\(20\)\n    fix: raise --max-tokens-per-gpu"):
        split_into_micro_batches(np.arange(1), np.array([21]), 20)


def test_padding_counts_towards_the_budget():
    parts = split_into_micro_batches(np.arange(4), np.array([2, 2, 2, 10]), 20)
    assert [p.tolist() for p in parts] == [[3, 0], [1, 2]]


def test_samples_without_trainable_token_are_not_run():
    (step,) = plan([4, 4, 4], trainable=[True, False, True])
    assert step.samples.tolist() == [0, 1, 2]
    assert [p.tolist() for p in step.micro_batches[0]] == [[0, 2]]
