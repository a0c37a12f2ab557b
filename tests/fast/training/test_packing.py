import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.checks import check_batch
from miles.backends.training_utils.packing import FlatBatch, SequenceLayout
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


# Case B27: the log-prob of token t comes from the logits at t - 1.
def test_a_token_is_predicted_from_the_place_before_it():
    packed = FlatBatch.from_batch(make_batch([[5, 6, 7, 8]], [[1, 1]]))
    part = packed.micro_batch(np.array([0]))
    assert part.input_ids_T.tolist() == [5, 6, 7]
    assert part.positions_N.tolist() == [1, 2]
    assert part.targets_N.tolist() == [7, 8]
    assert part.entries_N.tolist() == [0, 1]


def test_sequences_stand_end_to_end_longest_first_and_masked_tokens_are_left_out():
    packed = FlatBatch.from_batch(make_batch([[1, 2], [8, 9, 1], [3, 4, 5, 6, 7]], [[1], [1, 1], [1, 0, 1]]))
    part = packed.micro_batch(np.array([1, 2]))
    assert part.input_ids_T.tolist() == [3, 4, 5, 6, 8, 9]
    assert part.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert part.layout.cu_seqlens.tolist() == [0, 4, 6]
    assert part.layout.max_length == 4
    assert part.targets_N.tolist() == [5, 7, 9, 1]
    assert part.positions_N.tolist() == [1, 3, 4, 5]
    assert part.entries_N.tolist() == [3, 5, 1, 2]
    assert part.input_ids_T[part.positions_N].tolist() == [4, 6, 8, 9]


def test_a_micro_batch_of_no_sample_predicts_nothing_but_can_run():
    part = FlatBatch.from_batch(make_batch([[1, 2]], [[1]])).micro_batch(np.zeros(0, dtype=np.int64))
    assert part.input_ids_T.tolist() == part.position_ids_T.tolist() == [0]
    assert part.layout.cu_seqlens.tolist() == [0, 1]
    assert part.targets_N.tolist() == []


def test_what_the_model_reads_goes_to_its_device_and_the_batchs_entries_stay():
    part = FlatBatch.from_sequences([[1, 2, 3], [4, 5]]).micro_batch(np.arange(2))
    assert part.to(torch.device("cpu")) is part
    moved = part.to(torch.device("meta"))
    there = (moved.input_ids_T, moved.position_ids_T, moved.positions_N, moved.targets_N, moved.layout.cu_seqlens)
    assert all(tensor.is_meta for tensor in there)
    assert torch.equal(moved.entries_N, part.entries_N)
    assert moved.layout.max_length == 2
    assert [group.rows for group in moved.layout.groups] == [2]
    assert all(group.gather.is_meta and group.scatter.is_meta for group in moved.layout.groups)


def test_sequences_of_like_length_attend_side_by_side_and_others_do_not():
    groups = SequenceLayout.of([100, 90, 81, 79, 20, 10, 10]).groups
    assert [(g.start, g.stop, g.rows, g.width) for g in groups] == [
        (0, 271, 3, 100),
        (271, 350, 1, 79),
        (350, 390, 3, 20),
    ]
    assert groups[1].gather is None
    assert groups[1].scatter is None


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_groups_hold_every_token_once_and_are_mostly_full(lengths):
    layout = SequenceLayout.of(lengths)
    borders = np.cumsum([0, *lengths])
    assert [g.start for g in layout.groups] == [0, *(g.stop for g in layout.groups[:-1])]
    assert layout.groups[-1].stop == borders[-1]
    for group in layout.groups:
        first = int(np.flatnonzero(borders == group.start)[0])
        own = lengths[first : first + group.rows]
        assert max(own) == group.width
        assert group.width <= 64 or min(own) >= 0.8 * group.width
        if group.gather is not None:
            tokens = group.gather.view(group.rows, group.width)
            for row, (length, start) in enumerate(zip(own, np.cumsum([0, *own]), strict=False)):
                assert tokens[row, :length].tolist() == list(range(start, start + length))
            assert torch.equal(group.gather[group.scatter], torch.arange(sum(own)))


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
