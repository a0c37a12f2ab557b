import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.dataset.order import Order


class Rows:
    """A part without a file."""

    def __init__(self, name, count):
        self.name, self._count = name, count

    def __len__(self):
        return self._count

    def has(self, row):
        return row < self._count


def drawn(order, count):
    return [(part.name, row) for part, row in (order.draw() for _ in range(count))]


def test_a_shuffled_epoch_has_the_order_of_random_seeded_by_seed_and_epoch():
    taken = drawn(Order([Rows("a", 50)], [], 7), 100)
    for epoch in (0, 1):
        expected = list(range(50))
        random.Random(7 + epoch).shuffle(expected)
        assert [row for _, row in taken[50 * epoch : 50 * (epoch + 1)]] == expected


def test_in_file_order_no_part_behind_the_one_read_is_measured():
    class Endless(Rows):
        def __len__(self):
            raise AssertionError("the whole file would be searched")

    assert drawn(Order([Endless("a", 100), Endless("b", 100)], [], None), 3) == [("a", 0), ("a", 1), ("a", 2)]


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    weighted=st.booleans(),
    seed=st.none() | st.integers(0, 3),
    splits=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    data=st.data(),
)
def test_every_row_comes_once_an_epoch_and_a_position_continues_exactly(sizes, weighted, seed, splits, data):
    weights = data.draw(st.lists(st.sampled_from([0.3, 1, 2, 5]), min_size=len(sizes), max_size=len(sizes)))
    weights = weights if weighted else []
    parts = [Rows(str(i), size) for i, size in enumerate(sizes)]
    whole = drawn(Order(parts, weights, seed), sum(splits))
    order, pieces = Order(parts, weights, seed), []
    for count in splits:
        resumed = Order(parts, weights, seed)
        resumed.seek(order.state())
        pieces += drawn(resumed, count)
        assert resumed.position_of(resumed.state()) == divmod(len(pieces), sum(sizes))
        order = resumed
    assert pieces == whole
    rows_of = {part.name: [row for name, row in whole if name == part.name] for part in parts}
    epochs = [rows_of[p.name] for p in parts] if weights else [whole]
    lengths = sizes if weights else [sum(sizes)]
    for rows, length in zip(epochs, lengths, strict=True):
        for start in range(0, len(rows) - length + 1, length):
            assert len(set(rows[start : start + length])) == length


@pytest.mark.parametrize("weights", [[2, 1], [1, 1, 1], [0.7, 0.2, 0.1], [5, 3, 1, 1]])
def test_shares_are_those_of_the_weights_at_any_time(weights):
    order = Order([Rows(str(i), 10 + i) for i in range(len(weights))], weights, None)
    seen = Counter()
    for turn, (name, _) in enumerate(drawn(order, 500), 1):
        seen[name] += 1
        for i, weight in enumerate(weights):
            assert abs(seen[str(i)] - weight / sum(weights) * turn) <= len(weights) - 1
