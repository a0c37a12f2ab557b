import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from miles.backends.training_utils.advantages.discounted_sums import discounted_sums


def naive(values, lengths, decay):
    sums, end = list(values), 0
    for length in lengths:
        end += length
        for t in range(end - 2, end - length - 1, -1):
            sums[t] += decay * sums[t + 1]
    return sums


def random_values(size, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=dtype)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([2, 5, 8, 128]),
)
def test_chunks_give_what_a_loop_over_tokens_gives(lengths, decay, chunk):
    values = random_values(sum(lengths))
    got = discounted_sums(values, torch.tensor(lengths), decay, chunk)
    torch.testing.assert_close(got.tolist(), naive(values.tolist(), lengths, decay), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999, 1.0])
def test_long_sequences_of_uneven_length_agree_with_the_loop(decay):
    lengths = [20_001, 1, 128, 129, 16_384, 127]
    values = random_values(sum(lengths))
    got = discounted_sums(values, torch.tensor(lengths), decay)
    expected = torch.tensor(naive(values.tolist(), lengths, decay), dtype=torch.float64)
    error = (got - expected).abs().max() / expected.abs().max()
    assert float(error) < 1e-12


def test_nothing_to_scan_gives_nothing():
    assert discounted_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0.9).tolist() == []


def test_the_number_of_operations_does_not_grow_with_the_tokens():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def operations(length):
        with Count() as count:
            discounted_sums(torch.zeros(length, dtype=torch.float64), torch.tensor([length]), 0.9)
        return count.calls

    assert operations(16_000) == operations(150)
