import pytest
import torch

from miles.backends.training_utils import fused_head
from miles.backends.training_utils.log_probs import (
    CHUNK_ELEMENTS,
    Entropy,
    TargetLogProb,
    linear_log_softmax,
    token_log_probs,
)
from tests.ci.register import register_cuda_ci

register_cuda_ci(est_time=12, suite="stage-b-1-gpu-h200")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def inputs(dtype, n=700, d=256, v=20011):
    torch.manual_seed(0)
    hidden = torch.randn(n, d, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(v, d, device="cuda") / d**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), device="cuda")


def results(fn, hidden, weight, targets):
    logprobs, entropy = fn(hidden, weight, targets)
    mix = torch.linspace(-1, 2, len(targets), device="cuda")
    loss = (logprobs * mix).sum() + 0.3 * (entropy * mix.flip(0)).sum()
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, [hidden, weight])]


def away(found, expected):
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("kept_bytes", [0, 5 << 20, 1 << 30])
def test_fused_log_probs_entropies_and_gradients_are_those_of_a_plain_softmax(dtype, kept_bytes, monkeypatch):
    monkeypatch.setattr(fused_head, "CHUNK_LOGITS", 20011 * 96)
    hidden, weight, targets = inputs(dtype)

    def fused(h, w, t):
        return linear_log_softmax(h, w, (TargetLogProb(t), Entropy()), 0.7, kept_bytes=kept_bytes)

    def whole(h, w, t):
        log_p = torch.log_softmax(h.double() @ w.double().T / 0.7, dim=-1)
        return log_p.gather(1, t[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)

    def plain(h, w, t):
        return token_log_probs(h, w, t, 0.7, chunk_elements=CHUNK_ELEMENTS["cuda"])

    exact = results(whole, hidden, weight, targets)
    ours, theirs = (away(results(fn, hidden, weight, targets), exact) for fn in (fused, plain))
    print(dtype, "fused", ours, "plain", theirs)
    assert max(ours) < BOUNDS[dtype]
    assert all(mine < 1.5 * other + 1e-6 for mine, other in zip(ours, theirs, strict=True))


def test_logits_that_are_kept_change_no_bit():
    hidden, weight, targets = inputs(torch.bfloat16)

    def fused(kept_bytes):
        return results(
            lambda h, w, t: linear_log_softmax(h, w, (TargetLogProb(t), Entropy()), 1.0, kept_bytes=kept_bytes),
            hidden,
            weight,
            targets,
        )

    for kept, again in zip(fused(1 << 30), fused(0), strict=True):
        assert torch.equal(kept, again)


def test_nothing_predicted_gives_zero_gradients():
    hidden, weight, targets = inputs(torch.bfloat16, n=3)
    (logprobs,) = linear_log_softmax(hidden[:0], weight, (TargetLogProb(targets[:0]),), 1.0)
    (logprobs.sum()).backward()
    assert len(logprobs) == 0
    assert float(weight.grad.abs().max()) == 0
