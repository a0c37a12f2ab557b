import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.loss_hub.corrections import (
    PRESETS,
    Correction,
    Rejection,
    Weighting,
    build_correction,
)
from miles.backends.training_utils.loss_hub.custom_loss import CustomLoss
from miles.backends.training_utils.loss_hub.denominators import Denominator
from miles.backends.training_utils.loss_hub.objectives import OBJECTIVES, Bounds
from miles.backends.training_utils.loss_hub.policy_loss import PolicyLoss
from miles.backends.training_utils.loss_hub.sft_loss import SftLoss
from miles.config.schema import CorrectionConfig
from tests.fast.fsdp.loss_hooks import policy_gradient
from tests.fast.training.loss_support import make_samples, relative, run

BOUNDS = Bounds(clip_low=0.1, clip_high=0.15, divergence_bound=0.01)
LOSSES = {name: PolicyLoss(objective=name, bounds=BOUNDS) for name in OBJECTIVES}
LOSSES |= {
    "dual clip, entropy, kl": PolicyLoss(
        bounds=Bounds(dual_clip=1.1), entropy_coef=0.05, kl_coef=0.2, kl_kind="low_var_kl"
    ),
    "dppo by kl": PolicyLoss(objective="dppo", bounds=Bounds(divergence="kl", divergence_bound=0.001)),
    "opsm": PolicyLoss(opsm_delta=0.01),
    "k1": PolicyLoss(kl_coef=0.5, kl_kind="k1"),
    "k2": PolicyLoss(kl_coef=0.5, kl_kind="k2"),
    "unbiased kl": PolicyLoss(kl_coef=0.5, kl_kind="k3", kl_unbiased=True),
    "sft": SftLoss(),
    "custom": CustomLoss(policy_gradient, None),
}
DENOMINATORS = {
    kind: Denominator(kind=kind, constant=7.0)
    for kind in ("trajectories", "tokens", "prompts", "constant", "sequences")
}
CORRECTIONS = {name: build_correction(CorrectionConfig(preset=name)) for name in PRESETS}
CORRECTIONS |= {
    "tight tis": Correction(weighting=Weighting(upper=1.1)),
    "all": Correction(
        weighting=Weighting(level="geometric", mode="clip", lower=0.9, upper=1.2),
        rejection=Rejection(level="token", lower=0.7, upper=1.5),
        veto=0.5,
        batch_normalize=True,
    ),
}


@pytest.fixture(params=LOSSES, scope="module")
def loss(request):
    return LOSSES[request.param]


def random_parts(rng, count):
    order = rng.permutation(count)
    cuts = np.sort(rng.integers(0, count + 1, int(rng.integers(0, count + 1))))
    return [part.tolist() for part in np.split(order, cuts)]


def split_trajectory(samples, rng):
    """One sample becomes two: its response up to a point, and the rest of it."""
    number = int(rng.choice([i for i, s in enumerate(samples) if len(s["mask"]) > 1]))
    whole = samples[number]
    cut = int(rng.integers(1, len(whole["mask"])))
    first = {**whole, "tokens": whole["tokens"][: len(whole["tokens"]) - len(whole["mask"]) + cut]}
    second = dict(whole)
    for key in ("mask", "old", "rollout", "ref"):
        first[key], second[key] = whole[key][:cut], whole[key][cut:]
    return [*samples[:number], first, second, *samples[number + 1 :]]


def assert_same(one, other, but=()):
    assert one[0] == pytest.approx(other[0], rel=1e-9, abs=1e-12)
    assert relative(one[1], other[1]) < 1e-9
    kept = {name: value for name, value in other[2].items() if name not in but}
    assert {n: v for n, v in one[2].items() if n not in but} == pytest.approx(kept, rel=1e-6, abs=1e-9)


# Cases B22, B33, B36, B39, B21: micro-batches, some of them empty, and any order of samples.
@given(
    seed=st.integers(0, 10_000),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    kind=st.sampled_from(sorted(DENOMINATORS)),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_neither_micro_batches_nor_order_change_loss_gradient_or_metrics(loss, seed, correction, kind):
    rng = np.random.default_rng(seed)
    samples = make_samples(seed)
    whole = run(samples, loss, DENOMINATORS[kind], CORRECTIONS[correction])
    split = run(samples, loss, DENOMINATORS[kind], CORRECTIONS[correction], random_parts(rng, len(samples)))
    assert_same(split, whole)
    shuffled = [samples[i] for i in rng.permutation(len(samples))]
    assert_same(run(shuffled, loss, DENOMINATORS[kind], CORRECTIONS[correction]), whole)


# `sequences` counts samples, so that splitting one is meant to matter there; so is ess_ratio, which is of samples.
@given(
    seed=st.integers(0, 10_000),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    kind=st.sampled_from(["trajectories", "tokens", "prompts", "constant"]),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_splitting_a_trajectory_into_samples_changes_nothing(loss, seed, correction, kind):
    rng = np.random.default_rng(seed)
    samples = make_samples(seed, largest=12)
    whole = run(samples, loss, DENOMINATORS[kind], CORRECTIONS[correction])
    split = split_trajectory(split_trajectory(samples, rng), rng)
    found = run(split, loss, DENOMINATORS[kind], CORRECTIONS[correction], random_parts(rng, len(split)))
    assert_same(found, whole, but=("ess_ratio",))


def test_the_losses_compared_have_clipped_tokens_and_gradients(loss):
    _, gradient, metrics = run(make_samples(3), loss)
    assert float(gradient.abs().max()) > 1e-3
    assert 0 < metrics.get("pg_clipfrac", 0.5) < 1 or loss in (LOSSES["sapo"], LOSSES["opsm"])


def test_samples_rather_than_trajectories_are_counted_by_sequences():
    samples = make_samples(1, largest=12)
    split = split_trajectory(samples, np.random.default_rng(0))
    one, two = (run(s, LOSSES["ppo"], DENOMINATORS["sequences"])[0] for s in (samples, split))
    assert abs(one - two) > 1e-6


def test_doubling_the_batch_with_copies_changes_nothing(loss):
    samples = make_samples(2)
    copies = [{**s, "trajectory": s["trajectory"] + 100, "group": s["group"] + 100} for s in samples]
    one, two = run(samples, loss), run([*samples, *copies], loss)
    assert one[0] == pytest.approx(two[0], rel=1e-9)
    assert relative(two[1], one[1]) < 1e-9
