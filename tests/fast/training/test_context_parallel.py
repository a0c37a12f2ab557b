import pytest
import torch

from miles.backends.training_utils.context_parallel import CpSlices
from tests.fast.training.gloo_ranks import LENGTHS, cp_loss, cp_values, play_all

LAYOUTS = ("zigzag", "contiguous")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play_all(tmp_path_factory.mktemp("context"), "context:2", "context:4")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_gather_the_whole_that_was_sliced(played, ranks, layout):
    values = cp_values()
    found = [rank[layout] for rank in played["context", ranks]]
    assert len({len(rank["local"]) for rank in found}) == 1
    for rank in found:
        assert torch.equal(rank["whole"], values)
    assert sum(float(rank["local"].sum()) for rank in found) == pytest.approx(float(values.sum()))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_sum_of_all_ranks_losses(played, ranks, layout):
    values = cp_values().requires_grad_()
    sum(cp_loss(values) * (rank + 1) for rank in range(ranks)).backward()
    found = [rank[layout] for rank in played["context", ranks]]
    torch.testing.assert_close(sum(rank["grad"] for rank in found), values.grad, rtol=1e-12, atol=0)
    slices = CpSlices.of(LENGTHS, ranks, layout)
    for rank, part in enumerate(found):
        assert torch.all(part["grad_local"][slices.tokens_L[rank] < 0] == 0)
        torch.testing.assert_close(part["grad_local"], slices.slice(values.grad, rank), rtol=1e-12, atol=0)


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk_and_contiguous_one_chunk():
    zigzag, contiguous = (CpSlices.of([7, 1], 2, layout) for layout in LAYOUTS)
    assert [t.tolist() for t in zigzag.tokens_L] == [[0, 1, 6, -1, 7, -1], [2, 3, 4, 5, -1, -1]]
    assert [p.tolist() for p in zigzag.position_ids_L] == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]
    assert [t.tolist() for t in contiguous.tokens_L] == [[0, 1, 2, 3, 7], [4, 5, 6, -1, -1]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_is_on_exactly_one_rank(layout, size):
    slices = CpSlices.of(LENGTHS, size, layout)
    held = torch.cat(slices.tokens_L)
    assert torch.equal(held[held >= 0].sort().values, torch.arange(sum(LENGTHS)))
    assert torch.equal(held[slices.place_T], torch.arange(sum(LENGTHS)))


def test_no_sequence_gives_empty_slices():
    slices = CpSlices.of([], 2, "zigzag")
    assert slices.slice(torch.zeros(0, 3), 1).shape == (0, 3)
