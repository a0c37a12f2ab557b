import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.loss_hub.corrections import (
    PRESETS,
    Correction,
    Rejection,
    Weighting,
    build_correction,
    correct,
)
from miles.backends.training_utils.loss_hub.denominators import Denominator
from miles.config.schema import CorrectionConfig

F64 = torch.float64


def corrected(log_ratios, correction, trajectory=None, mask=None):
    old = torch.tensor(log_ratios, dtype=F64) - 1
    trainable = torch.ones(len(log_ratios), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    trajectory = torch.zeros(len(log_ratios), dtype=torch.int64) if trajectory is None else torch.tensor(trajectory)
    return correct(old, torch.full_like(old, -1.0), trainable, trajectory, correction)


def reference(log_ratios, trajectory, level, mode, lower, upper):
    """Weights and kept tokens, token by token."""
    weights, keep = [], []
    for own, t in zip(log_ratios, trajectory, strict=True):
        rows = [x for x, u in zip(log_ratios, trajectory, strict=True) if u == t]
        x = {"token": own, "sequence": sum(rows), "geometric": sum(rows) / len(rows)}[level]
        w = math.exp(min(max(x, -20), 20))
        inside = lower <= w <= upper
        keep.append(inside or mode != "mask")
        weights.append((w if inside else 0.0) if mode == "mask" else min(max(w, lower), upper))
    return weights, keep


LOG_RATIOS, TRAJECTORY = [0.1, -1.5, 0.8, -0.4, 0.3, 0.02], [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_weights_equal_a_scalar_reference(level, mode):
    lower = 0.0 if mode == "truncate" else 0.5
    found = corrected(
        LOG_RATIOS, Correction(weighting=Weighting(level=level, mode=mode, lower=lower, upper=1.3)), TRAJECTORY
    )
    weights, keep = reference(LOG_RATIOS, TRAJECTORY, level, mode, lower, 1.3)
    assert found.weights_R.tolist() == pytest.approx(weights, abs=1e-12)
    assert found.keep_R.tolist() == keep


# Case B12: rejected tokens leave the loss mask, and the mean is over what is left.
def test_rejected_tokens_leave_numerator_and_denominator():
    found = corrected([0.1, -1.5, 0.8, -10.0, 0.3], Correction(weighting=Weighting(mode="mask", lower=0.5, upper=2.0)))
    assert found.keep_R.tolist() == [True, False, False, False, True]
    weights = Denominator().token_weights(
        found.keep_R.numpy().astype(np.float32), np.zeros(5, np.int64), np.zeros(1, np.int64), [np.zeros(1, np.int64)]
    )
    mean = float((torch.tensor(weights) * found.weights_R).sum())
    assert mean == pytest.approx((math.exp(0.1) + math.exp(0.3)) / 2)
    assert mean == pytest.approx(1.2275, abs=1e-4)
    assert found.metrics["mis_rejected"] == pytest.approx(3 / 5)


# Case B15: the level says which weight is meant, and metrics have it before it is bounded.
@pytest.mark.parametrize(("level", "long"), [("geometric", 0.9802), ("sequence", 0.1353)])
def test_sequence_weights_shrink_with_length_and_geometric_ones_do_not(level, long):
    for length, expected in ((1, 0.9802), (100, long)):
        found = corrected([-0.02] * length, Correction(weighting=Weighting(level=level, upper=2.0)))
        assert float(found.weights_R[0]) == pytest.approx(expected, abs=1e-4)
    found = corrected([1.0], Correction(weighting=Weighting(level=level, upper=2.0)))
    assert float(found.weights_R[0]) == 2.0
    assert found.metrics["tis"] == pytest.approx(math.e)
    assert found.metrics["tis_clipfrac"] == 1


# Case B16: the weight is old over rollout, whatever the current policy is, and has no gradient.
def test_the_weight_is_of_the_old_policy_and_detached():
    old, rollout = torch.tensor([-1.2], requires_grad=True), torch.tensor([-1.5])
    found = correct(
        old, rollout, torch.tensor([True]), torch.tensor([0]), build_correction(CorrectionConfig(use_tis=True))
    )
    assert float(found.weights_R) == pytest.approx(1.34986, rel=1e-5)
    assert not found.weights_R.requires_grad


@pytest.mark.parametrize("value", [200.0, float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("preset", PRESETS)
def test_masked_tokens_are_read_by_nothing(preset, value):
    correction = build_correction(CorrectionConfig(preset=preset, veto_threshold=0.1, batch_normalize=True))
    clean, spoiled = (corrected([0.1, x, 0.3], correction, [0, 0, 1], mask=[1, 0, 1]) for x in (0.0, value))
    assert torch.equal(clean.weights_R, spoiled.weights_R)
    assert torch.equal(clean.keep_R, spoiled.keep_R)
    assert clean.metrics == spoiled.metrics
    assert float(clean.weights_R[1]) == 0
    assert not bool(clean.keep_R[1])


def test_equal_policies_correct_nothing():
    for preset in PRESETS:
        found = corrected([0.0] * 4, build_correction(CorrectionConfig(preset=preset)), [0, 0, 1, 1])
        assert found.weights_R.tolist() == [1.0] * 4
        assert found.keep_R.all()
        assert found.metrics["mis_k3"] == found.metrics["mis_chi2_seq"] == 0


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.integers(0, 999))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_parts_combine_and_do_not_depend_on_order(log_ratios, seed):
    rng = np.random.default_rng(seed)
    trajectory = rng.integers(0, 3, len(log_ratios)).tolist()
    rejection = Rejection(level="geometric", lower=0.6, upper=1.8)
    both = Correction(weighting=Weighting(upper=1.5), rejection=rejection, veto=0.2)
    found = corrected(log_ratios, both, trajectory)
    weights, _ = reference(log_ratios, trajectory, "token", "truncate", 0.0, 1.5)
    _, inside = reference(log_ratios, trajectory, "geometric", "mask", 0.6, 1.8)
    vetoed = {t for x, t in zip(log_ratios, trajectory, strict=True) if math.exp(x) < 0.2}
    keep = [i and t not in vetoed for i, t in zip(inside, trajectory, strict=True)]
    assert found.keep_R.tolist() == keep
    assert found.weights_R.tolist() == pytest.approx([w * k for w, k in zip(weights, keep, strict=True)], abs=1e-9)
    order = rng.permutation(len(log_ratios))
    again = corrected([log_ratios[i] for i in order], both, [trajectory[i] for i in order])
    assert again.weights_R.tolist() == pytest.approx(found.weights_R[torch.tensor(order)].tolist(), abs=1e-9)
    assert again.metrics == pytest.approx(found.metrics, rel=1e-9, abs=1e-9)


def test_normalised_weights_have_mean_one_over_what_is_left():
    correction = Correction(weighting=Weighting(mode="mask", lower=0.5, upper=2.0), batch_normalize=True)
    found = corrected([0.5, -0.5, 3.0, 0.1], correction)
    assert float(found.weights_R[found.keep_R].mean()) == pytest.approx(1)
    assert float(found.weights_R[2]) == 0


def test_a_batch_that_is_rejected_whole_leaves_zeros_and_no_nan():
    correction = Correction(weighting=Weighting(mode="mask", lower=0.5, upper=2.0), batch_normalize=True)
    found = corrected([5.0, -5.0], correction)
    assert found.weights_R.tolist() == [0, 0]
    assert found.metrics["mis_trajectories_rejected"] == 1
    nothing = corrected([1.0], correction, mask=[0])
    assert nothing.weights_R.tolist() == [0]
    assert nothing.metrics == {}


def test_a_veto_takes_the_whole_trajectory():
    found = corrected([0.0, -9.0, 0.0, 0.0], Correction(veto=1e-3), [0, 0, 1, 1])
    assert found.keep_R.tolist() == [False, False, True, True]
    assert found.metrics["mis_vetoed"] == 0.5


def test_metrics_of_the_mismatch_are_those_of_their_formulas():
    found = corrected(LOG_RATIOS, Correction(), TRAJECTORY).metrics
    d = np.array(LOG_RATIOS)
    rho, product = np.exp(d), np.exp([d[:2].sum(), d[2:5].sum(), d[5]])
    assert found["mis_kl"] == pytest.approx(-d.mean())
    assert found["mis_k3"] == found["train_rollout_kl"] == pytest.approx((rho - 1 - d).mean())
    assert found["mis_chi2_token"] == pytest.approx((rho**2).mean() - 1)
    assert found["mis_chi2_seq"] == pytest.approx((product**2).mean() - 1)
    assert found["train_rollout_logprob_abs_diff"] == pytest.approx(np.abs(d).mean())
    assert found["mis_ppl_rollout"] == pytest.approx(math.e)
    assert found["mis_ppl_train"] == pytest.approx(np.exp(1 - np.array([d[:2].mean(), d[2:5].mean(), d[5]])).mean())
    assert (found["mis_ratio_min"], found["mis_ratio_max"]) == pytest.approx((rho.min(), rho.max()))


@pytest.mark.parametrize(
    ("settings", "weighting", "rejection"),
    [
        ({}, None, None),
        ({"use_tis": True}, Weighting(upper=2.0), None),
        ({"preset": "tis", "upper": 3.0, "lower": 0.1}, Weighting(lower=0.1, upper=3.0), None),
        ({"preset": "mis"}, Weighting(level="sequence", mode="mask", lower=0.5, upper=2.0), None),
        ({"preset": "mis", "upper": 4.0}, Weighting(level="sequence", mode="mask", lower=0.25, upper=4.0), None),
        ({"preset": "mis", "mode": "truncate"}, Weighting(level="sequence", lower=0.0, upper=2.0), None),
        ({"preset": "mis", "level": "geometric", "mode": "clip"}, Weighting(level="geometric", mode="clip", lower=0.5, upper=2.0), None),
        ({"preset": "icepop"}, Weighting(mode="mask", lower=0.5, upper=5.0), None),
        ({"preset": "icepop", "upper": 3.0}, Weighting(mode="mask", lower=0.5, upper=3.0), None),
        ({"preset": "decoupled_ppo"}, Weighting(upper=None), None),
        ({"preset": "rejection"}, None, Rejection(level="sequence", lower=0.5, upper=2.0)),
        ({"preset": "rejection", "rejection_level": "geometric", "rejection_upper": 1.25}, None, Rejection(level="geometric", lower=0.8, upper=1.25)),
        ({"use_tis": True, "rejection_level": "token", "rejection_lower": 0.1}, Weighting(upper=2.0), Rejection(level="token", lower=0.1, upper=2.0)),
    ],
)  # fmt: skip
def test_settings_name_the_correction(settings, weighting, rejection):
    found = build_correction(CorrectionConfig(**settings))
    assert (found.weighting, found.rejection) == (weighting, rejection)
    assert found.is_active == (weighting is not None or rejection is not None)


def test_decoupled_ppo_does_not_bound_weights_but_for_the_log_ratio():
    found = corrected([3.0, 50.0], build_correction(CorrectionConfig(preset="decoupled_ppo")))
    assert found.weights_R.tolist() == pytest.approx([math.exp(3), math.exp(20)])


def test_products_over_a_trajectory_are_bounded_like_ratios():
    up, down = (
        corrected([x] * 300, Correction(weighting=Weighting(level="sequence", upper=None))) for x in (15.0, -15.0)
    )
    assert up.weights_R[0] == pytest.approx(math.exp(20))
    assert down.weights_R[0] == pytest.approx(math.exp(-20))
    assert all(math.isfinite(value) for value in (*up.metrics.values(), *down.metrics.values()))
