import pickle
import re

import numpy as np
import pytest

from miles.core.train_batch import Column, TrainBatch, concat


def batch(**further):
    return TrainBatch(
        columns={
            "tokens": Column.from_rows([[1, 2, 3], [4]], "token", "int64"),
            "loss_mask": Column.from_rows([[1, 0], []], "response"),
            "reward": Column.from_rows([0.5, 1.0], "sample"),
            **further,
        }
    )


def test_rows_come_back_as_they_were_put_in():
    column = Column.from_rows([[[1, 2]], [], [[3, 4], [5, 6]]], "transition", "int32", (2,))
    assert [row.tolist() for row in column.rows()] == [[[1, 2]], [], [[3, 4], [5, 6]]]
    assert column.lengths().tolist() == [1, 0, 2]
    assert column.values.dtype == np.int32
    picked = column.select([2, 0])
    assert [row.tolist() for row in picked.rows()] == [[[3, 4], [5, 6]], [[1, 2]]]


def test_selecting_keeps_every_kind_of_column():
    marks = [object(), object()]
    part = batch(marks=Column.from_rows(marks, "opaque")).select([1])
    assert part["marks"].row(0) is marks[1]
    assert part["reward"].values.tolist() == [1.0]
    assert (part.total_lengths.tolist(), part.response_lengths.tolist()) == ([1], [0])


def test_a_selection_of_nothing_is_a_batch():
    empty = batch().select([])
    assert len(empty) == 0
    assert empty["tokens"].values.shape == (0,)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (Column.from_rows([[1, 2], [1]], "token"), "column new (token axis): sample 0 has 2 entries, expected 3"),
        (
            Column.from_rows([[1, 2], [1]], "response"),
            "column new (response axis): sample 1 has 1 entries, expected 0",
        ),
        (
            Column.from_rows([[1, 2], [1]], "transition"),
            "column new (transition axis): sample 1 has 1 entries, expected 0",
        ),
        (Column.from_rows([1.0], "sample"), "column new has 1 rows but there are 2 samples"),
    ],
)
def test_a_column_of_wrong_length_is_named(column, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        batch(new=column)


def test_missing_and_clashing_columns_are_named():
    with pytest.raises(ValueError, match="missing: loss_mask"):
        TrainBatch(columns={"tokens": Column.from_rows([[1]], "token", "int64")})
    with pytest.raises(ValueError, match="may not replace columns of the batch: reward"):
        TrainBatch(columns=batch().columns, extra={"reward": Column.from_rows([1, 2], "sample")})
    with pytest.raises(KeyError, match="no column 'rewards'; it has loss_mask, reward, tokens"):
        batch()["rewards"]


def test_rows_of_wrong_shape_are_named():
    with pytest.raises(ValueError, match=re.escape("row 1 has shape (2, 3); expected [*, 2]")):
        Column.from_rows([np.zeros((1, 2)), np.zeros((2, 3))], "response", "float32", (2,))
    with pytest.raises(ValueError, match="no axis 'tokens'; the axes are token, response"):
        Column.from_rows([[1]], "tokens")


def test_joined_batches_are_the_batch_that_was_split():
    whole = batch(marks=Column.from_rows(["a", "b"], "opaque"))
    joined = concat([whole.select([0]), whole.select([1])])
    assert joined["marks"].values == ["a", "b"]
    for name in ("tokens", "loss_mask", "reward"):
        assert joined[name].values.tobytes() == whole[name].values.tobytes()
        assert joined[name].offsets.tolist() == whole[name].offsets.tolist()
    with pytest.raises(ValueError, match="different columns: marks"):
        concat([whole, batch()])
    with pytest.raises(ValueError, match="no batch to join"):
        concat([])


def test_a_batch_travels_between_processes():
    there = pickle.loads(pickle.dumps(batch()))
    assert there["tokens"].values.tolist() == [1, 2, 3, 4]
    assert len(there) == 2
