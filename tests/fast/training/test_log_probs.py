import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loss_path import largest_live_bytes
from miles.backends.training_utils import log_probs
from miles.backends.training_utils.log_probs import (
    CHUNK_ELEMENTS,
    WEIGHT_ROWS,
    Entropy,
    TargetLogProb,
    TopK,
    linear_log_softmax,
    token_log_probs,
)


def reference(hidden, weight, targets, temperature):
    log_p = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(dtype=torch.float64, n=11, d=5, v=7):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, v, (n,), generator=generator)


@pytest.mark.parametrize("chunk_elements", [1, 7 * 3, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_a_plain_log_softmax(chunk_elements, temperature):
    hidden, weight, targets = inputs()
    mix = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    gradients = []
    for fn in (reference, lambda *a: token_log_probs(*a, chunk_elements=chunk_elements)):
        logprobs, entropy = fn(hidden, weight, targets, temperature)
        loss = (logprobs * mix).sum() + (entropy * mix.flip(0)).sum()
        gradients.append((logprobs, entropy, *torch.autograd.grad(loss, [hidden, weight])))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradient_of_log_probs_alone_and_of_entropy_alone():
    hidden, weight, targets = inputs()
    for which in (0, 1):
        ours = torch.autograd.grad(token_log_probs(hidden, weight, targets, 0.5)[which].sum(), [hidden, weight])
        theirs = torch.autograd.grad(reference(hidden, weight, targets, 0.5)[which].sum(), [hidden, weight])
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# Case B28: one division by the temperature, for log-probs and entropy alike.
def test_entropy_is_of_the_tempered_distribution():
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [0.0]])
    _, entropy = token_log_probs(hidden, weight, torch.tensor([0]), 0.5)
    assert float(entropy) == pytest.approx(0.0901, abs=1e-4)
    _, entropy = token_log_probs(hidden, weight, torch.tensor([0]), 1.0)
    assert float(entropy) == pytest.approx(0.3653, abs=1e-4)


def test_all_logits_never_exist_at_once_in_either_pass(monkeypatch):
    sizes = []
    whole = log_probs._log_softmax

    def watched(*args):
        result = whole(*args)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(log_probs, "_log_softmax", watched)
    hidden, weight, targets = inputs()
    token_log_probs(hidden, weight, targets, 1.0, chunk_elements=21)[0].sum().backward()
    assert max(sizes) <= 21
    assert len(sizes) == 2 * math.ceil(11 / 3)


def test_softmax_runs_in_fp32_when_the_model_is_bf16():
    hidden, weight, targets = inputs()
    logprobs, entropy = token_log_probs(hidden.bfloat16(), weight.bfloat16(), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, _ = reference((hidden.bfloat16() @ weight.bfloat16().T).float(), torch.eye(7), targets, 1.0)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_no_predicted_token_gives_empty_results_and_zero_gradients():
    hidden, weight, _ = inputs(n=0)
    logprobs, _ = token_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0)
    assert logprobs.shape == (0,)
    assert float(torch.autograd.grad(logprobs.sum(), weight)[0].abs().sum()) == 0


@given(
    n=st.integers(1, 12),
    v=st.integers(1, 12),
    chunk=st.integers(1, 150),
    temperature=st.floats(0.2, 3),
    scale=st.floats(0.01, 30),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_any_chunking_gives_the_values_and_gradients_of_the_whole(n, v, chunk, temperature, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(n, 3, generator=generator, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(v, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, v, (n,), generator=generator)
    found = []
    for fn in (reference, lambda *a: token_log_probs(*a, chunk_elements=chunk)):
        logprobs, entropy = fn(hidden, weight, targets, temperature)
        found.append((logprobs, entropy, *torch.autograd.grad((logprobs - 2 * entropy).sum(), [hidden, weight])))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9 * max(1, scale))


def test_golden_numbers():
    hidden = torch.eye(2, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    logprobs, entropy = token_log_probs(hidden, weight, torch.tensor([0, 2]), 0.5)
    # softmax([2, 0, 0]) and softmax([0, 4, 0])
    assert logprobs.tolist() == pytest.approx([-0.2395448, -4.0359763], abs=1e-7)
    assert entropy.tolist() == pytest.approx([0.6655726, 0.1773233], abs=1e-6)
    (grad,) = torch.autograd.grad(logprobs[0], hidden)
    assert grad[0].tolist() == pytest.approx([0.4260274, -0.4260274], abs=1e-6)


def test_the_largest_log_probs_are_found_and_carry_gradients():
    hidden, weight, targets = inputs(v=9)
    logprobs, best, ids = linear_log_softmax(
        hidden, weight, (TargetLogProb(targets), TopK(3)), 0.7, chunk_elements=9 * 4
    )
    whole = torch.log_softmax(hidden @ weight.T / 0.7, dim=-1)
    expected, expected_ids = torch.topk(whole, 3, dim=1)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(best, expected, rtol=0, atol=1e-12)
    mix = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    ours = torch.autograd.grad((best * mix).sum() + logprobs.sum(), [hidden, weight])
    theirs = torch.autograd.grad((expected * mix).sum() + whole.gather(1, targets[:, None]).sum(), [hidden, weight])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_detached_entropy_is_not_computed_again_in_the_backward_pass(monkeypatch):
    calls = []
    entropy_of = Entropy._of
    monkeypatch.setattr(Entropy, "_of", staticmethod(lambda chunk: calls.append(1) or entropy_of(chunk)))
    hidden, weight, targets = inputs()
    logprobs, entropy = token_log_probs(hidden, weight, targets, 1.0)
    (logprobs - entropy.detach()).sum().backward()
    assert len(calls) == 1


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets = inputs()
    weight.requires_grad_(False)
    token_log_probs(hidden, weight, targets, 1.0)[0].sum().backward()
    assert weight.grad is None
    assert float(hidden.grad.abs().max()) > 0


def test_gradients_in_bf16_are_summed_in_fp32():
    hidden, weight, targets = inputs(torch.float32, n=400, d=16, v=50)
    exact = torch.autograd.grad(token_log_probs(hidden, weight, targets, 1.0)[0].sum(), [hidden, weight])
    half_hidden, half_weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    for chunk in (50, 50 * 64, 10**6):
        logprobs, _ = token_log_probs(half_hidden, half_weight, targets, 1.0, chunk_elements=chunk)
        rounded = torch.autograd.grad(logprobs.sum(), [half_hidden, half_weight])
        for a, b in zip(rounded, exact, strict=True):
            assert float((a.float() - b).norm() / b.norm()) < 0.02


def test_memory_of_the_head_stays_below_its_bound(monkeypatch):
    """T 16,384, V 151,936, hidden 2,048 in bf16 with every length divided by 64, so that 1.5 GiB become 384 KiB."""
    scale = 64
    monkeypatch.setattr(log_probs, "WEIGHT_ROWS", WEIGHT_ROWS // scale)
    tokens, vocabulary, size = 16384 // scale, 151936 // scale, 2048 // scale
    hidden = torch.randn(tokens, size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, size, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))

    def extra(chunk_elements):
        def run():
            logprobs, entropy = token_log_probs(hidden, weight, targets, 0.7, chunk_elements=chunk_elements)
            (logprobs.sum() + 0.01 * entropy.sum()).backward()

        return largest_live_bytes(run) - weight.numel() * weight.itemsize

    bound = 1.5 * 2**30 / scale**2
    assert extra(CHUNK_ELEMENTS["cuda"] // scale**2) <= bound
    assert extra(tokens * vocabulary) > 4 * bound
