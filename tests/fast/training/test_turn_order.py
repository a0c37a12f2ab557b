import numpy as np
import pytest

from miles.backends.training_utils.advantages import ADVANTAGES, compute_advantages
from miles.backends.training_utils.advantages.turns import require_turn_order
from miles.backends.training_utils.packing import FlatBatch
from miles.core.train_batch import Column, TrainBatch
from miles.errors import TrainingError
from tests.fast.training.test_advantages import inputs

DIALOGUE = [1, 2, 3, 4, 5, 6, 7, 8, 9]
TURNS = {"first": (4, 2), "second": (7, 2), "third": (9, 1)}
"""How many tokens of the dialogue a turn's sample has, and how many of them are its response."""


def check(samples, trajectory=None):
    """Samples are (tokens, mask of the response)."""
    columns = {
        "tokens": Column.from_rows([tokens for tokens, _ in samples], "token", "int64"),
        "loss_mask": Column.from_rows([mask for _, mask in samples], "response"),
        "sample_index": Column.from_rows(list(range(70, 70 + len(samples))), "sample", "int64"),
    }
    batch = TrainBatch(columns=columns)
    trajectory_B = np.asarray([0] * len(samples) if trajectory is None else trajectory)
    require_turn_order(batch, FlatBatch.from_batch(batch), trajectory_B)


def turn(name):
    length, response = TURNS[name]
    return DIALOGUE[:length], [1] * response


# The reward of a trajectory reaches its earlier turns through the later ones, so their order is part of the result.
def test_the_order_of_turns_decides_returns():
    both = [
        compute_advantages(
            ADVANTAGES["reinforce_plus_plus"],
            inputs([1.0, 1.0], masks, trajectories=[0, 0], gamma=0.5),
            normalize=False,
        )
        for masks in ([[1], [1, 1]], [[1, 1], [1]])
    ]
    assert [output.advantages_R.tolist() for output in both] == [[0.25, 0.5, 1.0], [0.25, 0.5, 1.0]]
    apart = inputs([1.0, 1.0], [[1, 1], [1]], trajectories=[0, 0], values=[[0.5, 0.4], [0.3]], gamma=0.5)
    turned = inputs([1.0, 1.0], [[1], [1, 1]], trajectories=[0, 0], values=[[0.3], [0.5, 0.4]], gamma=0.5)
    one, other = (
        compute_advantages(ADVANTAGES["ppo"], b, normalize=False).advantages_R.tolist() for b in (apart, turned)
    )
    assert one[2] == pytest.approx(0.7)  # the last token has the whole reward
    assert other[0] == pytest.approx(0.25 - 0.3)  # as the first one a quarter of it


@pytest.mark.parametrize("order", [["first", "second", "third"], ["first", "third"], ["second"], []])
def test_turns_in_the_order_in_which_they_were_played_pass(order):
    check([turn(name) for name in order])


@pytest.mark.parametrize(
    ("order", "late", "early"),
    [(["second", "first"], 70, 71), (["first", "third", "second"], 71, 72), (["second", "third", "first"], 71, 72)],
)
def test_turns_in_another_order_are_refused_by_name(order, late, early):
    message = (
        rf"samples {late}, {early} are one trajectory, and sample {early}, .*comes after sample {late}.*\n    fix: "
    )
    with pytest.raises(TrainingError, match=message):
        check([turn(name) for name in order])


def test_turns_of_different_trajectories_have_no_order_between_them():
    check([turn("second"), turn("first")], trajectory=[0, 1])
    check([turn("first"), turn("second"), turn("second"), turn("third")], trajectory=[3, 0, 3, 0])


def test_a_sample_of_other_tokens_is_taken_as_it_comes():
    summary = ([9, 9, 3, 4], [1, 1])
    check([turn("third"), summary])
    check([summary, turn("third")])


def test_masked_turns_have_no_place_in_the_order():
    tokens, mask = turn("first")
    check([turn("second"), (tokens, [0] * len(mask))])
    whole = (DIALOGUE, [1, 1, 0, 0, 0, 0, 0])  # all of the dialogue, of which the first turn is trained on
    check([whole, turn("second")])
    with pytest.raises(TrainingError, match="sample 71, the earlier turn"):
        check([turn("second"), whole])
