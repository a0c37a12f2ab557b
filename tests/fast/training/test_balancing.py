import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.balancing import first_fit_decreasing, karmarkar_karp


def plain_first_fit(sizes, capacity):
    bins = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for part in bins:
            if sum(sizes[i] for i in part) + sizes[item] <= capacity:
                part.append(item)
                break
        else:
            bins.append([item])
    return bins


@given(st.lists(st.integers(0, 20), max_size=40))
@settings(max_examples=200, deadline=None)
def test_bins_are_those_of_a_plain_first_fit(sizes):
    assert first_fit_decreasing(sizes, 20) == plain_first_fit(sizes, 20)


def test_an_item_larger_than_a_bin_is_refused():
    assert first_fit_decreasing([20, 20], 20) == [[0], [1]]
    with pytest.raises(ValueError, match="item 1 of size 21 does not fit into a bin of 20"):
        first_fit_decreasing([3, 21], 20)


def test_eight_thousand_items_take_less_than_a_second():
    sizes = np.random.default_rng(0).integers(64, 8193, 8192).tolist()
    started = time.process_time()
    bins = first_fit_decreasing(sizes, 16384)
    assert time.process_time() - started < 1
    assert sum(sizes) / (len(bins) * 16384) > 0.99


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_parts_have_every_item_once_and_about_equally_many(costs, parts):
    found = karmarkar_karp(costs, parts)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) and len(part) <= -(-len(costs) // parts) for part in found)


def test_differencing_finds_the_even_split_that_greedy_misses():
    costs = [8, 7, 6, 5, 4]
    sums = sorted(sum(costs[i] for i in part) for part in karmarkar_karp(costs, 2))
    assert sums == [14, 16]
    costs = [10, 9, 8, 7, 6, 5, 4, 3]
    assert sorted(sum(costs[i] for i in part) for part in karmarkar_karp(costs, 2)) == [26, 26]


def test_many_items_come_out_even():
    costs = np.random.default_rng(1).random(800).tolist()
    sums = [sum(costs[i] for i in part) for part in karmarkar_karp(costs, 8)]
    assert max(sums) / min(sums) < 1.001
