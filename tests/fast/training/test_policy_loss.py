import math

import pytest
import torch

from miles.backends.training_utils.loss import build_loss
from miles.backends.training_utils.loss_hub.policy_loss import PolicyLoss, clipped_objective, kl_estimate
from miles.backends.training_utils.loss_hub.records import LossInputs
from miles.config.schema import AlgorithmConfig

KINDS = ["k1", "k2", "k3", "low_var_kl"]


def random_inputs(n=12, dtype=torch.float64, masked=()):
    generator = torch.Generator().manual_seed(1)
    logprobs, old, ref, advantages = (torch.randn(n, generator=generator, dtype=dtype) for _ in range(4))
    weights = torch.rand(n, generator=generator, dtype=dtype)
    weights[list(masked)] = 0
    return {
        "logprobs_N": (-logprobs.abs()).requires_grad_(),
        "entropy_N": torch.rand(n, generator=generator, dtype=dtype).requires_grad_(),
        "weights_N": weights,
        "old_logprobs_N": -old.abs(),
        "advantages_N": advantages,
        "ref_logprobs_N": -ref.abs(),
    }


def reference_loss(values, low, high, dual, entropy_coef, kl_coef, kind):
    total = 0.0
    for lp, h, w, old, a, ref in zip(*(v.tolist() for v in values.values()), strict=True):
        ratio = math.exp(lp - old)
        term = max(-ratio * a, -min(max(ratio, 1 - low), 1 + high) * a)
        if dual and a < 0:
            term = min(-dual * a, term)
        d = lp - ref
        kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]
        total += w * (term - entropy_coef * h + kl_coef * kl)
    return total


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_golden_numbers_against_a_scalar_loop(kind, dual):
    values = random_inputs()
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=dual, entropy_coef=0.01, kl_coef=0.1, kl_kind=kind)
    output = loss(LossInputs(**values))
    assert float(output.loss.detach()) == pytest.approx(
        reference_loss(values, 0.2, 0.28, dual, 0.01, 0.1, kind), abs=1e-12
    )
    parts = output.weighted
    assert float(output.loss.detach()) == pytest.approx(
        float(parts["pg_loss"] - 0.01 * parts["entropy"] + 0.1 * parts["kl_loss"]), abs=1e-12
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(10.0, -1.0, 3.0), (10.0, 1.0, -1.2), (1.0, 1.0, -1.0), (1.1, -1.0, 1.1)]
)
def test_dual_clip_bounds_only_negative_advantages(ratio, advantage, loss):
    terms = clipped_objective(
        torch.tensor([math.log(ratio)]),
        torch.zeros(1),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    assert float(terms.loss_N) == pytest.approx(loss, abs=1e-6)


def test_clip_higher_moves_only_the_upper_bound():
    ratios = torch.tensor([1.25, 1.25, 0.7, 0.7]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    terms = clipped_objective(ratios, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(terms.loss_N, torch.tensor([-1.25, 1.25, -0.7, 0.8]))
    assert terms.clipped_N.tolist() == [0, 0, 0, 1]


def test_a_far_off_ratio_stays_finite():
    logprobs = torch.tensor([500.0, -500.0], requires_grad=True)
    terms = clipped_objective(logprobs, torch.zeros(2), torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    terms.loss_N.sum().backward()
    assert torch.isfinite(terms.loss_N).all()
    assert torch.isfinite(logprobs.grad).all()


P, REF = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def expected_gradient(kind):
    logits = P.log().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    (log_p.detach().exp() * kl_estimate(log_p, REF.log(), kind)).sum().backward()
    return logits.grad


def kl_gradient(direction):
    logits = P.log().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    kl = (log_p.exp() * (log_p - REF.log())).sum() if direction == "reverse" else (REF * (REF.log() - log_p)).sum()
    kl.backward()
    return logits.grad


def test_k1_and_k3_are_unbiased_as_values():
    kl = float((P * (P / REF).log()).sum())
    for kind in ("k1", "k3", "low_var_kl"):
        assert float((P * kl_estimate(P.log(), REF.log(), kind)).sum()) == pytest.approx(kl, abs=1e-12)


def test_expected_gradients_of_the_estimators_as_losses():
    assert float(expected_gradient("k1").abs().max()) < 1e-12
    torch.testing.assert_close(expected_gradient("k2"), kl_gradient("reverse"), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_gradient("k3"), kl_gradient("forward"), rtol=0, atol=1e-12)


def test_low_var_kl_is_bounded():
    assert float(kl_estimate(torch.tensor(-40.0), torch.tensor(0.0), "low_var_kl")) == 10.0
    assert math.isfinite(float(kl_estimate(torch.tensor(-300.0), torch.tensor(0.0), "low_var_kl")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["logprobs_N", "old_logprobs_N", "ref_logprobs_N", "advantages_N", "entropy_N"])
@pytest.mark.parametrize("value", [200.0, -6.0, float("-inf"), float("nan")])
def test_values_at_masked_tokens_change_nothing(kind, column, value):
    loss = PolicyLoss(dual_clip=2.0, entropy_coef=0.1, kl_coef=0.1, kl_kind=kind)
    results = []
    for spoil in (False, True):
        values = random_inputs(masked=(2, 7))
        if spoil:
            with torch.no_grad():
                values[column][[2, 7]] = value
        output = loss(LossInputs(**values))
        output.loss.backward()
        gradients = torch.stack([values["logprobs_N"].grad, values["entropy_N"].grad])
        assert gradients[:, [2, 7]].abs().max() == 0
        results.append([output.loss, gradients, *output.weighted.values(), *output.token_sums.values()])
        results[-1].append(output.maxima["ratio_max"])
    for clean, spoiled in zip(*results, strict=True):
        assert torch.equal(clean, spoiled)


def test_kl_is_taken_over_trainable_tokens_only():
    values = {
        "logprobs_N": torch.tensor([0.1, -5.0, -5.0, 0.3]),
        "entropy_N": torch.zeros(4),
        "weights_N": torch.tensor([0.5, 0.0, 0.0, 0.5]),
        "old_logprobs_N": torch.zeros(4),
        "advantages_N": torch.zeros(4),
        "ref_logprobs_N": torch.zeros(4),
    }
    output = PolicyLoss(kl_kind="k1")(LossInputs(**values))
    assert float(output.weighted["kl_loss"]) == pytest.approx(0.2)


def test_zero_advantage_gives_exactly_zero_loss_and_gradient():
    values = random_inputs()
    values["advantages_N"] = torch.zeros_like(values["advantages_N"])
    del values["ref_logprobs_N"]
    output = PolicyLoss()(LossInputs(**values))
    output.loss.backward()
    assert float(output.loss.detach()) == 0
    assert float(values["logprobs_N"].grad.abs().max()) == 0


def test_a_fully_masked_micro_batch_adds_nothing():
    values = random_inputs(n=3, masked=(0, 1, 2))
    output = PolicyLoss(entropy_coef=0.1, kl_coef=0.1)(LossInputs(**values))
    output.loss.backward()
    assert float(output.loss.detach()) == 0
    assert output.num_tokens == 0
    assert output.maxima["ratio_max"].numel() == 0
    assert float(values["logprobs_N"].grad.abs().max()) == 0


def test_sft_loss_is_the_weighted_negative_log_prob():
    values = random_inputs(masked=(3,))
    with torch.no_grad():
        values["logprobs_N"][3] = float("nan")
    output = build_loss(AlgorithmConfig(loss_type="sft_loss"))(
        LossInputs(**{k: values[k] for k in ("logprobs_N", "entropy_N", "weights_N")})
    )
    keep = values["weights_N"] != 0
    expected = -(values["weights_N"] * values["logprobs_N"])[keep].sum()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert output.num_tokens == 11


def test_settings_reach_the_loss():
    loss = build_loss(
        AlgorithmConfig(eps_clip=0.1, eps_clip_c=4.0, entropy_coef=0.2, kl_loss_coef=0.3, kl_loss_type="k2")
    )
    assert loss == PolicyLoss(clip_low=0.1, clip_high=0.1, dual_clip=4.0, entropy_coef=0.2, kl_coef=0.0, kl_kind="k2")
    loss = build_loss(AlgorithmConfig(eps_clip_high=0.3, use_kl_loss=True, kl_loss_coef=0.3))
    assert loss == PolicyLoss(clip_low=0.2, clip_high=0.3, kl_coef=0.3, kl_kind="k1")
