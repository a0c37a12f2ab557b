import math

import pytest
import torch

from miles.backends.training_utils import log_probs
from miles.backends.training_utils.log_probs import token_log_probs


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
