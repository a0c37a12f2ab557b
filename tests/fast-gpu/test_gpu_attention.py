import pytest
import torch
from torch.nn import functional as F

from miles.backends.fsdp_utils.packed_attention import packed_attention
from miles.backends.training_utils.sequence_layout import SequenceLayout
from tests.ci.register import register_cuda_ci

register_cuda_ci(est_time=25, suite="stage-b-1-gpu-h200")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PACKS = {
    "equal": [128] * 6,
    "one": [1000],
    "alike": [300, 290, 280, 140, 130, 33, 1],
    "many": list(range(90, 10, -1)),
}
DEVICE = torch.device("cuda")


def tensors(total, heads, groups, dtype):
    torch.manual_seed(0)
    shapes = ((heads, total), (groups, total), (groups, total))
    # As models make them: heads beside each other in a token, then a view.
    return [torch.randn(1, t, h, 64, device=DEVICE, dtype=dtype).transpose(1, 2).requires_grad_() for h, t in shapes]


def reference(query, key, value, lengths, window):
    parts = []
    for q, k, v in zip(*(x.double().split(lengths, dim=2) for x in (query, key, value)), strict=True):
        places = torch.arange(q.shape[2], device=DEVICE)
        behind = places[:, None] - places
        seen = (behind >= 0) & (behind < (window or 1 << 30))
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True, scale=0.125))
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(
    ("dtype", "by_borders"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_pack_attends_as_each_of_its_sequences_alone(pack, window, dtype, by_borders):
    lengths = PACKS[pack]
    given = tensors(sum(lengths), 4, 2, dtype)
    layout = SequenceLayout.of(lengths).to(DEVICE)
    layout.by_borders = by_borders
    expected = reference(*given, lengths, window)
    grad = torch.randn_like(expected)
    exact = [expected, *torch.autograd.grad(expected, given, grad)]
    found, _ = packed_attention(
        torch.nn.Linear(1, 1), *given, None, scaling=0.125, sliding_window=window, sequence_layout=layout
    )
    ours = [found, *torch.autograd.grad(found, given, grad.to(dtype))]
    away = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, exact, strict=True)]
    print(pack, window, dtype, by_borders, away)
    assert max(away) < (1e-5 if dtype == torch.float32 else 2e-2)
