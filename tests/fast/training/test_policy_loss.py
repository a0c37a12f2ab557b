import math

import pytest
import torch

from miles.backends.training_utils.loss import build_loss
from miles.backends.training_utils.loss_hub.objectives import OBJECTIVES, Bounds, binary_divergence, clipped_terms
from miles.backends.training_utils.loss_hub.policy_loss import PolicyLoss
from miles.backends.training_utils.loss_hub.records import LossInputs
from miles.backends.training_utils.metrics import StepMetrics
from miles.config.schema import AlgorithmConfig

BOUNDS = Bounds(clip_low=0.2, clip_high=0.28, divergence_bound=0.03)
F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def random_inputs(n=12, masked=(), seed=1):
    generator = torch.Generator().manual_seed(seed)
    logprobs, drift, ref, advantages, entropy = (torch.randn(n, generator=generator, dtype=F64) for _ in range(5))
    trajectory = torch.arange(n) // 4
    weights = torch.full((n,), 1.0, dtype=F64)
    weights[list(masked)] = 0
    weights = weights / torch.bincount(trajectory, weights=weights)[trajectory] / 3
    logprobs = -logprobs.abs() - 0.1
    return {
        "logprobs_N": logprobs.clone().requires_grad_(),
        "entropy_N": entropy.abs().requires_grad_(),
        "weights_N": weights,
        "trajectory_N": trajectory,
        "sample_N": trajectory,
        "old_logprobs_N": (logprobs + 0.4 * drift).clamp(max=-0.01),
        "advantages_N": advantages[trajectory],
        "ref_logprobs_N": -ref.abs(),
    }


def value_and_gradient(loss_fn, values):
    output = loss_fn(LossInputs(**values))
    (gradient,) = torch.autograd.grad(output.loss, values["logprobs_N"])
    return output, gradient


def clip(x, low, high):
    return min(max(x, low), high) if isinstance(x, float) else x.clamp(low, high)


def reference_ppo(lp, old, a, b):
    ratio = (lp - old).exp()
    return [torch.maximum(-r * a, -clip(r, 1 - b.clip_low, 1 + b.clip_high) * a) for r in ratio]


def reference_gspo(lp, old, a, b):
    s = (lp - old).mean().exp()
    return [torch.maximum(-s * a, -clip(s, 1 - b.clip_low, 1 + b.clip_high) * a)] * len(lp)


def reference_gmpo(lp, old, a, b):
    d = lp - old
    d = torch.minimum(d, tensor(b.clip_high)) if a >= 0 else torch.maximum(d, tensor(-b.clip_low))
    return [-(d.exp().prod() ** (1 / len(lp))) * a] * len(lp)


def reference_cispo(lp, old, a, b):
    return [
        -clip(math.exp(x - o), 1 - b.clip_low, 1 + b.clip_high) * a * x0
        for x, o, x0 in zip(lp.tolist(), old, lp, strict=True)
    ]


def reference_sapo(lp, old, a, b):
    tau = b.tau_pos if a > 0 else b.tau_neg
    return [-4 / tau / (1 + (-tau * (r - 1)).exp()) * a for r in (lp - old).exp()]


def reference_dppo(lp, old, a, b):
    p, q = lp.detach().exp(), old.exp()
    masked = ((a > 0) & (p > q) | (a < 0) & (p < q)) & ((p - q).abs() > b.divergence_bound)
    return [-r * a * (1 - m) for r, m in zip((lp - old).exp(), masked.to(F64), strict=True)]


REFERENCES = {
    "ppo": reference_ppo,
    "gspo": reference_gspo,
    "gmpo": reference_gmpo,
    "cispo": reference_cispo,
    "sapo": reference_sapo,
    "dppo": reference_dppo,
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_equal_the_paper_s_formula(name, seed):
    values = random_inputs(seed=seed)
    output, gradient = value_and_gradient(PolicyLoss(objective=name, bounds=BOUNDS), values)
    expected = tensor(0.0)[0]
    for t in range(3):
        rows = slice(4 * t, 4 * t + 4)
        terms = REFERENCES[name](
            values["logprobs_N"][rows], values["old_logprobs_N"][rows], values["advantages_N"][4 * t], BOUNDS
        )
        expected = expected + torch.stack(list(terms)).mean() / 3
    (theirs,) = torch.autograd.grad(expected, values["logprobs_N"])
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-12)
    assert float(gradient.abs().max()) > 0


# ratios 1.1 and 1.5 of a trajectory with advantage 1, 1.0 and 0.75 of one with advantage -1, all token weights 1/4
@pytest.mark.parametrize(
    ("name", "loss", "gradient"),
    [
        ("ppo", (-1.1 - 1.2 + 1.0 + 0.8) / 4, [-1.1 / 4, 0.0, 1.0 / 4, 0.0]),
        ("gspo", (-2 * 1.2 + 2 * math.sqrt(0.75)) / 4, [0.0, 0.0, math.sqrt(0.75) / 4, math.sqrt(0.75) / 4]),
        ("gmpo", (-2 * math.sqrt(1.1 * math.exp(0.2)) + 2 * math.sqrt(math.exp(-0.2))) / 4, None),
        ("cispo", (1.1 * 1 + 1.2 * 1 - 1.0 * 1 - 0.8 * 1) / 4, [-1.1 / 4, -1.2 / 4, 1.0 / 4, 0.8 / 4]),
        ("sapo", None, [-1.1 / 4 / math.cosh(0.05) ** 2, -1.5 / 4 / math.cosh(0.25) ** 2, 0.25, 0.1843067552]),
        ("dppo", (-1.1 + 1.0) / 4, [-1.1 / 4, 0.0, 1.0 / 4, 0.0]),
    ],
)
def test_golden_numbers(name, loss, gradient):
    logprobs = tensor(-1.0, -1.0, -1.0, -1.0).requires_grad_()
    values = {
        "logprobs_N": logprobs,
        "weights_N": torch.full((4,), 0.25, dtype=F64),
        "trajectory_N": torch.tensor([0, 0, 1, 1]),
        "sample_N": torch.tensor([0, 0, 1, 1]),
        "old_logprobs_N": -1.0 - tensor(1.1, 1.5, 1.0, 0.75).log(),
        "advantages_N": tensor(1.0, 1.0, -1.0, -1.0),
    }
    output, found = value_and_gradient(PolicyLoss(objective=name, bounds=Bounds(divergence_bound=0.05)), values)
    if loss is not None:
        assert float(output.loss.detach()) == pytest.approx(loss, abs=1e-8)
    if gradient is not None:
        assert found.tolist() == pytest.approx(gradient, abs=1e-8)


# Case B31.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(10.0, -1.0, 3.0), (10.0, 1.0, -1.2), (1.0, 1.0, -1.0), (1.1, -1.0, 1.1)]
)
def test_dual_clip_bounds_only_negative_advantages(ratio, advantage, loss):
    terms = clipped_terms(tensor(ratio), tensor(advantage), Bounds(dual_clip=3.0))
    assert float(terms.loss_N) == pytest.approx(loss, abs=1e-12)


def test_clip_higher_moves_only_the_upper_bound():
    terms = clipped_terms(tensor(1.25, 1.25, 0.7, 0.7), tensor(1.0, -1.0, 1.0, -1.0), Bounds(clip_high=0.3))
    torch.testing.assert_close(terms.loss_N, tensor(-1.25, 1.25, -0.7, 0.8))
    assert terms.clipped_N.tolist() == [0, 0, 0, 1]


# Case B18: a sequence's ratio is repeated over its tokens, and the trajectory weighs 1 whatever its length.
def test_a_sequence_ratio_counts_once_however_long_the_sequence_is():
    values = {
        "logprobs_N": tensor(-1.0, -1.0, -1.0, -1.0).requires_grad_(),
        "weights_N": tensor(1 / 2, 1 / 6, 1 / 6, 1 / 6),
        "trajectory_N": torch.tensor([0, 1, 1, 1]),
        "sample_N": torch.tensor([0, 1, 1, 1]),
        "old_logprobs_N": tensor(-1.0, -1.0, -1.0, -1.0),
        "advantages_N": tensor(1.0, -1.0, -1.0, -1.0),
    }
    loss = PolicyLoss(objective="gspo")
    assert float(loss(LossInputs(**values)).loss.detach()) == pytest.approx(0, abs=1e-12)
    values["weights_N"] = tensor(0.25, 0.25, 0.25, 0.25)
    assert float(loss(LossInputs(**values)).loss.detach()) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_far_off_ratio_stays_finite(name):
    values = random_inputs(n=4)
    values["logprobs_N"] = tensor(-500.0, -0.1, -800.0, -0.1).requires_grad_()
    values["old_logprobs_N"] = tensor(-0.1, -500.0, -0.1, -800.0)
    output, gradient = value_and_gradient(PolicyLoss(objective=name), values)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(gradient).all()


def test_divergence_of_one_token_against_all_others():
    p, q = 0.3, 0.5
    assert float(binary_divergence(tensor(p).log(), tensor(q).log(), "tv")) == pytest.approx(0.2)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    assert float(binary_divergence(tensor(p).log(), tensor(q).log(), "kl")) == pytest.approx(kl, rel=1e-9)
    assert float(binary_divergence(tensor(0.0), tensor(0.0), "kl")) == 0


def test_dppo_lets_tokens_come_back_into_the_trust_region():
    values = random_inputs(n=4)
    values["old_logprobs_N"] = tensor(0.2, 0.2, 0.6, 0.6).log()
    values["logprobs_N"] = tensor(0.6, 0.6, 0.2, 0.2).log().requires_grad_()
    values["advantages_N"] = tensor(1.0, -1.0, 1.0, -1.0)
    for divergence in ("tv", "kl"):
        loss = PolicyLoss(objective="dppo", bounds=Bounds(divergence=divergence, divergence_bound=0.1))
        _, gradient = value_and_gradient(loss, values)
        assert (gradient != 0).tolist() == [False, True, True, False]


def test_opsm_leaves_out_drifted_trajectories_of_negative_advantage_only():
    values = random_inputs(n=12)
    values["old_logprobs_N"] = values["logprobs_N"].detach() + tensor(
        0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, -1, 0, 0, 0
    )
    values["advantages_N"] = tensor(-1.0, 1.0, -1.0)[values["trajectory_N"]]
    output, gradient = value_and_gradient(PolicyLoss(opsm_delta=0.1, bounds=Bounds(clip_low=0.9)), values)
    assert (gradient != 0).tolist() == [False] * 4 + [True] * 8
    assert float(output.metrics().token_sums["opsm_clipfrac"]) == 4


# Cases B19, B24, B16: whatever a masked token holds, loss, gradient and metrics have the same bits.
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    "column",
    ["logprobs_N", "old_logprobs_N", "ref_logprobs_N", "advantages_N", "entropy_N", "correction_N"],
)
@pytest.mark.parametrize("value", [200.0, -2.0, -6.0, float("-inf"), float("nan")])
def test_values_at_masked_tokens_change_nothing(name, column, value):
    loss = PolicyLoss(objective=name, opsm_delta=0.5, entropy_coef=0.1, kl_coef=0.1, kl_kind="k3", kl_unbiased=True)
    results = []
    for spoil in (False, True):
        values = random_inputs(masked=(2, 7)) | {"correction_N": torch.full((12,), 0.5, dtype=F64)}
        if spoil:
            with torch.no_grad():
                values[column][[2, 7]] = value
        output = loss(LossInputs(**values))
        output.loss.backward()
        gradients = torch.stack([values["logprobs_N"].grad, values["entropy_N"].grad])
        assert gradients[:, [2, 7]].abs().max() == 0
        metrics = StepMetrics()
        metrics.add(output)
        results.append((output.loss.detach(), gradients, metrics.reduce()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


# Case B25: a token that the model cannot produce any more has no term, is counted, and leaves the KL's weights alone.
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_token_of_current_log_prob_minus_infinity_is_dropped_and_counted(name):
    values = {
        "logprobs_N": tensor(float("-inf"), -1.0).requires_grad_(),
        "weights_N": tensor(0.5, 0.5),
        "trajectory_N": torch.tensor([0, 0]),
        "sample_N": torch.tensor([0, 0]),
        "old_logprobs_N": tensor(-2.0, -1.0),
        "advantages_N": tensor(1.0, 1.0),
        "ref_logprobs_N": tensor(-2.0, -1.5),
    }
    output, gradient = value_and_gradient(PolicyLoss(objective=name, kl_coef=1.0), values)
    assert torch.isfinite(gradient).all()
    assert float(gradient[0]) == 0
    assert output.metrics().counts["dropped_tokens"] == 1
    assert output.metrics().num_tokens == 1
    assert float(output.metrics().weighted["kl_loss"]) == pytest.approx(0.5 * 0.5)
    metrics = StepMetrics()
    metrics.add(output)
    assert metrics.reduce()["ois"] == pytest.approx(1.0)


def test_nan_in_a_trainable_token_is_not_hidden():
    for column in ("logprobs_N", "old_logprobs_N", "advantages_N"):
        values = random_inputs()
        with torch.no_grad():
            values[column][3] = float("nan")
        assert math.isnan(float(PolicyLoss()(LossInputs(**values)).loss.detach()))


# Case B16: the correction is a detached factor beside the ratio, which starts from the old log-probs.
def test_correction_weights_multiply_terms_and_their_gradient():
    values = random_inputs(n=1) | {
        "logprobs_N": tensor(-1.0).requires_grad_(),
        "old_logprobs_N": tensor(-1.2),
        "advantages_N": tensor(1.0),
        "weights_N": tensor(1.0),
        "correction_N": tensor(math.exp(0.3)),
    }
    output, gradient = value_and_gradient(PolicyLoss(bounds=Bounds(clip_high=1.0)), values)
    assert float(output.loss.detach()) == pytest.approx(-1.34986 * 1.2214, rel=1e-4)
    assert float(gradient) == pytest.approx(-1.34986 * 1.2214, rel=1e-4)


# Case B40.
def test_kl_is_taken_over_trainable_tokens_only():
    values = {
        "logprobs_N": tensor(0.1, -5.0, -5.0, 0.3),
        "weights_N": tensor(0.5, 0.0, 0.0, 0.5),
        "trajectory_N": torch.zeros(4, dtype=torch.int64),
        "sample_N": torch.zeros(4, dtype=torch.int64),
        "old_logprobs_N": torch.zeros(4, dtype=F64),
        "advantages_N": torch.zeros(4, dtype=F64),
        "ref_logprobs_N": torch.zeros(4, dtype=F64),
    }
    output = PolicyLoss(kl_kind="k1")(LossInputs(**values))
    assert float(output.metrics().weighted["kl_loss"]) == pytest.approx(0.2)


def test_entropy_and_kl_enter_with_their_coefficients():
    values = random_inputs()
    output = PolicyLoss(entropy_coef=0.01, kl_coef=0.1, kl_kind="k2")(LossInputs(**values))
    parts = output.metrics().weighted
    expected = parts["pg_loss"] - 0.01 * parts["entropy_loss"] + 0.1 * parts["kl_loss"]
    assert float(output.loss.detach()) == pytest.approx(float(expected), abs=1e-12)
    output.loss.backward()
    torch.testing.assert_close(values["entropy_N"].grad, -0.01 * values["weights_N"])
    assert "entropy_loss" not in PolicyLoss()(LossInputs(**{**values, "entropy_N": None})).metrics().weighted


@pytest.mark.parametrize("name", OBJECTIVES)
def test_zero_advantage_gives_exactly_zero_loss_and_gradient(name):
    values = random_inputs()
    values["advantages_N"] = torch.zeros(12, dtype=F64)
    output, gradient = value_and_gradient(PolicyLoss(objective=name), values)
    assert float(output.loss.detach()) == 0
    assert float(gradient.abs().max()) == 0


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("n", [0, 4])
def test_a_micro_batch_without_trainable_token_adds_nothing(name, n):
    values = {key: value[:n] for key, value in random_inputs().items()}
    values["weights_N"] = torch.zeros(n, dtype=F64)
    output = PolicyLoss(objective=name, opsm_delta=0.1, entropy_coef=0.1, kl_coef=0.1)(LossInputs(**values))
    output.loss.backward()
    assert float(output.loss.detach()) == 0
    assert output.metrics().num_tokens == 0
    metrics = StepMetrics()
    metrics.add(output)
    assert metrics.reduce()["trainable_tokens"] == 0


def test_effective_sample_size_is_one_for_equal_ratios_and_small_when_one_outweighs():
    values = random_inputs(n=8)
    values["old_logprobs_N"] = values["logprobs_N"].detach() - tensor(0, 0, 0, 0, 9, 0, 0, 0)
    metrics = StepMetrics()
    metrics.add(PolicyLoss()(LossInputs(**values)))
    w = [math.exp(9), 1, 1, 1]
    expected = (1 + sum(w) ** 2 / (4 * sum(x * x for x in w))) / 2
    assert metrics.reduce()["ess_ratio"] == pytest.approx(expected)


def test_sft_loss_is_the_weighted_negative_log_prob():
    values = random_inputs(masked=(3,))
    with torch.no_grad():
        values["logprobs_N"][3] = float("nan")
    output = build_loss(AlgorithmConfig(loss_type="sft_loss"))(LossInputs(**values))
    keep = values["weights_N"] != 0
    expected = -(values["weights_N"] * values["logprobs_N"])[keep].sum()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert output.metrics().num_tokens == 11


def test_settings_reach_the_loss():
    loss = build_loss(
        AlgorithmConfig(eps_clip=0.1, eps_clip_c=4.0, entropy_coef=0.2, kl_loss_coef=0.3, kl_loss_type="k2")
    )
    bounds = Bounds(clip_low=0.1, clip_high=0.1, dual_clip=4.0)
    assert loss == PolicyLoss(bounds=bounds, entropy_coef=0.2, kl_coef=0.0, kl_kind="k2")
    loss = build_loss(AlgorithmConfig(eps_clip_high=0.3, use_kl_loss=True, kl_loss_coef=0.3, use_unbiased_kl=True))
    assert loss == PolicyLoss(bounds=Bounds(clip_high=0.3), kl_coef=0.3, kl_kind="k1", kl_unbiased=True)
    loss = build_loss(AlgorithmConfig(sapo_tau_pos=2, sapo_tau_neg=3, dppo_divergence="kl", dppo_bound=0.3))
    bounds = Bounds(tau_pos=2, tau_neg=3, divergence="kl", divergence_bound=0.3)
    assert loss == PolicyLoss(bounds=bounds)
    assert build_loss(AlgorithmConfig(use_opsm=True, opsm_delta=0.5)).opsm_delta == 0.5


@pytest.mark.parametrize(("estimator", "objective"), [("grpo", "ppo"), ("dapo", "ppo"), ("gspo", "gspo"), ("cispo", "cispo"), ("sapo", "sapo"), ("gmpo", "gmpo"), ("dppo", "dppo"), ("rloo", "ppo")])  # fmt: skip
def test_an_estimator_named_after_an_objective_brings_it_unless_another_is_chosen(estimator, objective):
    assert build_loss(AlgorithmConfig(advantage_estimator=estimator)).objective == objective
    assert build_loss(AlgorithmConfig(advantage_estimator=estimator, policy_objective="sapo")).objective == "sapo"
