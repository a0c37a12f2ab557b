import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.sequence_layout import BORDERS, ROWS, SequenceLayout, _fastest, _rows_us

META = torch.device("meta")


def cost(lengths, firsts):
    ends = [*firsts[1:], len(lengths)]
    return sum(
        _rows_us(end - first, max(lengths[first:end]), sum(lengths[first:end]))
        for first, end in zip(firsts, ends, strict=True)
    )


def test_the_assumed_speeds_are_those_that_were_measured():
    for speed, short, long in ((ROWS, 298, 558), (BORDERS, 182, 297)):
        for length, tflops in ((2048, short), (16384, long)):
            found = 7 * 2048 * length**2 / speed.microseconds(length) / 1e6
            assert found == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize(
    ("lengths", "by_borders", "rows"),
    [
        ([2048] * 8, False, [8]),
        ([16384], False, [1]),
        ([9000, *[500] * 16], False, [1, 16]),
        ([2048, 2040, 2030, 2000], False, [4]),
        (list(range(400, 60, -4)), True, None),
    ],
)
def test_like_lengths_and_long_sequences_go_in_rows_and_many_short_ones_by_their_borders(lengths, by_borders, rows):
    layout = SequenceLayout.of(lengths).to(META)
    assert layout.by_borders is by_borders
    if rows:
        assert [group.rows for group in layout.groups] == rows


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_no_other_groups_would_be_much_faster(lengths):
    lengths = sorted(lengths, reverse=True)
    firsts, microseconds, _ = _fastest(lengths)
    assert cost(lengths, firsts) == pytest.approx(microseconds)
    others = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(lengths)), count) for count in range(len(lengths))
    )
    # Lengths within a sixteenth of the longest are not told apart.
    assert microseconds <= 1.15 * min(cost(lengths, [0, *other]) for other in others)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_every_sequence_is_in_one_group(lengths):
    firsts, *_ = _fastest(lengths)
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    groups = SequenceLayout.of(lengths).to(META).groups
    assert [group.stop for group in groups][-1] == sum(lengths)
    assert sum(group.rows for group in groups) == len(lengths)


def test_lengths_without_order_are_grouped_in_bounded_time():
    lengths = np.random.default_rng(0).integers(1, 5000, 3000).tolist()
    firsts, *_ = _fastest(lengths)
    assert len(firsts) <= 32
