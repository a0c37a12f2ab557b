import numpy as np
import pytest

from miles.backends.training_utils.checks import check_batch
from miles.backends.training_utils.packing import FlatBatch
from miles.core.train_batch import Column, TrainBatch
from miles.errors import TrainingError


def make_batch(tokens, masks, **columns):
    built = {
        "tokens": Column.from_rows(tokens, "token", "int64"),
        "loss_mask": Column.from_rows(masks, "response"),
        "sample_index": Column.from_rows([100 + b for b in range(len(tokens))], "sample", "int64"),
    }
    for name, rows in columns.items():
        built[name] = Column.from_rows(rows, "response" if isinstance(rows[0], list) else "sample")
    return TrainBatch(columns=built)


def test_a_token_is_predicted_from_the_place_before_it():
    packed = FlatBatch.from_batch(make_batch([[5, 6, 7, 8]], [[1, 1]]))
    part = packed.micro_batch(np.array([0]))
    assert part.input_ids_BT.tolist() == [[5, 6, 7]]
    assert part.positions_N.tolist() == [1, 2]
    assert part.targets_N.tolist() == [7, 8]
    assert part.entries_N.tolist() == [0, 1]


def test_rows_are_padded_on_the_right_and_masked_tokens_left_out():
    packed = FlatBatch.from_batch(make_batch([[1, 2], [3, 4, 5, 6, 7], [8, 9, 1]], [[1], [1, 0, 1], [1, 1]]))
    part = packed.micro_batch(np.array([1, 2]))
    assert part.input_ids_BT.tolist() == [[3, 4, 5, 6], [8, 9, 0, 0]]
    assert part.targets_N.tolist() == [5, 7, 9, 1]
    assert part.positions_N.tolist() == [1, 3, 4, 5]
    assert part.entries_N.tolist() == [1, 3, 4, 5]
    assert part.input_ids_BT.reshape(-1)[part.positions_N].tolist() == [4, 6, 8, 9]


def test_a_micro_batch_of_no_sample_predicts_nothing_but_can_run():
    part = FlatBatch.from_batch(make_batch([[1, 2]], [[1]])).micro_batch(np.zeros(0, dtype=np.int64))
    assert part.input_ids_BT.shape == (1, 1)
    assert part.targets_N.tolist() == []


def test_sequences_are_predicted_from_their_second_token_on():
    packed = FlatBatch.from_sequences([[4, 5, 6], [7], [8, 9]])
    assert packed.trainable_B.tolist() == [True, False, True]
    assert packed.micro_batch(np.array([0, 2])).targets_N.tolist() == [5, 6, 9]


def test_training_on_the_first_token_is_refused_unless_it_is_masked():
    with pytest.raises(TrainingError, match=r"first token.*samples 101\n    fix"):
        FlatBatch.from_batch(make_batch([[1, 2], [3, 4]], [[1], [1, 1]]))
    packed = FlatBatch.from_batch(make_batch([[3, 4]], [[0, 1]]))
    assert packed.micro_batch(np.array([0])).targets_N.tolist() == [4]


def check(batch, *columns):
    check_batch(batch, FlatBatch.from_batch(batch), vocab_size=10, columns=columns)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_names_its_samples(value):
    tokens, masks = [[1, 2, 3]] * 3, [[1, 1]] * 3
    batch = make_batch(tokens, masks, rollout_log_probs=[[-1.0, -1.0], [-1.0, value], [value, -1.0]])
    with pytest.raises(TrainingError, match=r"rollout_log_probs is .* at 2 of 6 places, in samples 101, 102"):
        check(batch, "rollout_log_probs")
    with pytest.raises(TrainingError, match=r"reward is .* at 1 of 3 places, in samples 102"):
        check(make_batch(tokens, masks, reward=[0.0, 1.0, value]), "reward")


def test_a_masked_value_may_be_anything():
    batch = make_batch([[1, 2, 3]], [[1, 0]], rollout_log_probs=[[-1.0, float("nan")]])
    check(batch, "rollout_log_probs")


def test_a_mask_that_is_not_a_number_is_refused():
    with pytest.raises(TrainingError, match=r"loss_mask is nan .* in samples 100"):
        check(make_batch([[1, 2, 3]], [[1, float("nan")]]))


def test_a_missing_column_and_a_foreign_token_id_are_refused():
    with pytest.raises(TrainingError, match="lacks the columns reward"):
        check(make_batch([[1, 2]], [[1]]), "reward")
    with pytest.raises(TrainingError, match=r"token id 10 is outside .* vocabulary of 10 in samples 101"):
        check(make_batch([[1, 2], [3, 10]], [[1], [1]]))


def test_many_bad_samples_are_counted_rather_than_listed():
    batch = make_batch([[1, 2]] * 25, [[1]] * 25, reward=[float("nan")] * 25)
    with pytest.raises(TrainingError, match=r"100, 101, .*109 and 15 more"):
        check(batch, "reward")
