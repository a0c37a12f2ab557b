import math

import pytest
import torch

from miles.backends.training_utils.loss_hub.kl import kl_estimate, unbiased_kl_estimate
from miles.backends.training_utils.loss_hub.policy_loss import PolicyLoss
from miles.backends.training_utils.loss_hub.records import LossInputs

P, REF = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
KINDS = ("k1", "k2", "k3", "low_var_kl")
OLD = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)


def expected_gradient(estimate, sampled_from=P):
    """The exact expectation of the gradient, by enumeration, over tokens that another policy sampled."""
    logits = P.log().requires_grad_()
    (sampled_from * estimate(torch.log_softmax(logits, 0))).sum().backward()
    return logits.grad


def kl_gradient(direction):
    logits = P.log().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    kl = (log_p.exp() * (log_p - REF.log())).sum() if direction == "reverse" else (REF * (REF.log() - log_p)).sum()
    kl.backward()
    return logits.grad


# Case B13, values.
def test_k1_and_k3_are_unbiased_as_values():
    kl = float((P * (P / REF).log()).sum())
    for kind in ("k1", "k3", "low_var_kl"):
        assert float((P * kl_estimate(P.log(), REF.log(), kind)).sum()) == pytest.approx(kl, abs=1e-12)


# Case B13, gradients.
def test_expected_gradients_of_the_estimators_as_losses():
    found = {kind: expected_gradient(lambda lp, k=kind: kl_estimate(lp, REF.log(), k)) for kind in KINDS}
    assert float(found["k1"].abs().max()) < 1e-12
    torch.testing.assert_close(found["k2"], kl_gradient("reverse"), rtol=0, atol=1e-12)
    for kind in ("k3", "low_var_kl"):
        torch.testing.assert_close(found[kind], kl_gradient("forward"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_the_unbiased_estimate_has_the_value_and_gradient_of_the_reverse_kl_on_tokens_of_the_old_policy(kind):
    gradient = expected_gradient(lambda lp: unbiased_kl_estimate(lp, REF.log(), OLD.log(), kind), OLD)
    torch.testing.assert_close(gradient, kl_gradient("reverse"), rtol=0, atol=1e-12)
    value = float((OLD * unbiased_kl_estimate(P.log(), REF.log(), OLD.log(), kind)).sum())
    assert value == pytest.approx(float((P * (P / REF).log()).sum()), abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_a_ten_line_reference(kind):
    for lp, ref in ((-0.3, -1.1), (-2.0, -0.2), (-0.5, -0.5)):
        d = lp - ref
        expected = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "low_var_kl": math.exp(-d) - 1 + d}[kind]
        found = kl_estimate(torch.tensor(lp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64), kind)
        assert float(found) == pytest.approx(expected, abs=1e-12)


def test_low_var_kl_is_bounded_and_k3_is_exact_for_small_differences():
    assert float(kl_estimate(torch.tensor(-40.0), torch.tensor(0.0), "low_var_kl")) == 10.0
    assert math.isfinite(float(kl_estimate(torch.tensor(-300.0), torch.tensor(0.0), "low_var_kl")))
    tiny = torch.tensor(1e-3)
    assert float(kl_estimate(tiny, torch.tensor(0.0), "k3")) == pytest.approx(5e-7, rel=1e-2)


def test_the_loss_uses_the_unbiased_form_when_asked():
    values = {
        "logprobs_N": P.log().requires_grad_(),
        "weights_N": OLD,
        "trajectory_N": torch.zeros(3, dtype=torch.int64),
        "sample_N": torch.zeros(3, dtype=torch.int64),
        "old_logprobs_N": OLD.log(),
        "ref_logprobs_N": REF.log(),
        "advantages_N": torch.zeros(3, dtype=torch.float64),
    }
    kl = float((P * (P / REF).log()).sum())
    weighted = PolicyLoss(kl_kind="k3", kl_unbiased=True)(LossInputs(**values)).metrics().weighted
    assert float(weighted["kl_loss"]) == pytest.approx(kl)
    plain = PolicyLoss(kl_kind="k3")(LossInputs(**values)).metrics().weighted
    assert abs(float(plain["kl_loss"]) - kl) > 1e-3
