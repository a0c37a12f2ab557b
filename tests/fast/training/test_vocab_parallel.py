import pytest
import torch

from miles.backends.training_utils.log_probs import Entropy, TargetLogProb, TopK, linear_log_softmax
from tests.fast.training.gloo_ranks import TEMPERATURE, K, head_inputs, head_loss, play_all


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play_all(tmp_path_factory.mktemp("vocab"), "vocab:2", "vocab:4")


def whole():
    hidden, weight, targets = head_inputs()
    weight.requires_grad_()
    heads = (TargetLogProb(targets), Entropy(), TopK(K))
    logprobs, entropy, best, ids = linear_log_softmax(hidden, weight, heads, TEMPERATURE)
    head_loss(logprobs, entropy, best).backward()
    return {
        "logprobs": logprobs,
        "entropy": entropy,
        "best": best,
        "ids": ids,
        "grad_hidden": hidden.grad,
    }, weight.grad


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_wholes_values_and_gradients(played, ranks):
    expected, grad_weight = whole()
    found = played["vocab", ranks]
    for rank in found:
        for name, values in expected.items():
            torch.testing.assert_close(rank[name], values.detach(), rtol=0, atol=1e-12, msg=name)
    torch.testing.assert_close(torch.cat([r["grad_weight"] for r in found]), grad_weight, rtol=0, atol=1e-12)


def test_shards_may_have_fewer_ids_than_are_asked_for(played):
    assert [len(rank["grad_weight"]) for rank in played["vocab", 2]] == [2, 11]
    assert K > 2
