"""The whole policy loss against ten lines of scalars in float64: objective, trajectories left out, correction, entropy, KL."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.context_parallel import CpSlices
from miles.backends.training_utils.loss_hub.corrections import PRESETS, build_correction, correct
from miles.backends.training_utils.loss_hub.denominators import Denominator
from miles.backends.training_utils.loss_hub.objectives import Bounds
from miles.backends.training_utils.loss_hub.policy_loss import PolicyLoss
from miles.backends.training_utils.loss_hub.records import LossInputs
from miles.backends.training_utils.loss_hub.sft_loss import SftLoss
from miles.config.schema import CorrectionConfig

COLUMNS = ("now", "old", "ref", "entropy", "correction", "advantage", "weight", "trajectory")
KL = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "low_var_kl": lambda d: min(math.exp(-d) - 1 + d, 10.0),
}


def draw(seed, tokens=9):
    """Tokens of three trajectories, some of weight 0, as one dict per token."""
    rng = np.random.default_rng(seed)
    now, ref = -rng.exponential(1, (2, tokens)) - 0.05
    columns = {"now": now, "old": np.minimum(now + rng.normal(0, 0.3, tokens), -0.01), "ref": ref}
    columns |= {"entropy": rng.random(tokens), "correction": rng.random(tokens) * 2}
    columns["trajectory"] = rng.integers(0, 3, tokens)
    columns["advantage"] = rng.normal(size=3)[columns["trajectory"]]
    columns["weight"] = rng.random(tokens) * (rng.random(tokens) < 0.8)
    return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*(columns[c].tolist() for c in COLUMNS), strict=True)]


def tensors(rows):
    def column(name):
        return torch.tensor([row[name] for row in rows], dtype=torch.float64)

    trajectory = torch.tensor([row["trajectory"] for row in rows])
    return LossInputs(
        logprobs_N=column("now").requires_grad_(),
        weights_N=column("weight"),
        trajectory_N=trajectory,
        sample_N=trajectory,
        entropy_N=column("entropy"),
        old_logprobs_N=column("old"),
        advantages_N=column("advantage"),
        ref_logprobs_N=column("ref"),
        correction_N=column("correction"),
    )


def divergence(p, q, kind):
    return abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def reference(rows, loss):
    """What `loss` is on these tokens, one after another."""
    total, b = 0.0, loss.bounds
    for row in rows:
        d, a = row["now"] - row["old"], row["advantage"]
        term = max(-math.exp(d) * a, -min(max(math.exp(d), 1 - b.clip_low), 1 + b.clip_high) * a)
        if b.dual_clip is not None and a < 0:
            term = min(term, -b.dual_clip * a)
        if loss.objective == "dppo":
            far = divergence(math.exp(row["now"]), math.exp(row["old"]), b.divergence) > b.divergence_bound
            term = 0.0 if far and d * a > 0 else -math.exp(d) * a
        own = [r for r in rows if r["trajectory"] == row["trajectory"] and r["weight"]]
        if loss.opsm_delta is not None and a < 0 and row["weight"]:
            total_weight = sum(r["weight"] for r in own)
            drift = sum(r["weight"] * (r["old"] - r["now"]) for r in own) / total_weight
            term = 0.0 if drift > loss.opsm_delta else term
        kl = KL[loss.kl_kind](row["now"] - row["ref"]) * (math.exp(d) if loss.kl_unbiased else 1.0)
        rest = loss.kl_coef * kl - loss.entropy_coef * row["entropy"]
        total += row["weight"] * (term * row["correction"] + rest)
    return total


LOSSES = {
    "clip": PolicyLoss(),
    "clip higher": PolicyLoss(bounds=Bounds(clip_low=0.1, clip_high=0.3)),
    "dual clip": PolicyLoss(bounds=Bounds(clip_low=0.1, clip_high=0.3, dual_clip=1.2)),
    "dppo by tv": PolicyLoss(objective="dppo", bounds=Bounds(divergence="tv", divergence_bound=0.05)),
    "dppo by kl": PolicyLoss(objective="dppo", bounds=Bounds(divergence="kl", divergence_bound=0.01)),
    "opsm": PolicyLoss(opsm_delta=0.02),
    **{f"entropy, {kind}": PolicyLoss(entropy_coef=0.3, kl_coef=0.7, kl_kind=kind) for kind in KL},
    "unbiased k3": PolicyLoss(kl_coef=0.7, kl_kind="k3", kl_unbiased=True),
    "everything": PolicyLoss(
        bounds=Bounds(dual_clip=1.5), opsm_delta=0.1, entropy_coef=0.1, kl_coef=0.2, kl_kind="low_var_kl"
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_loss_is_its_formula_token_by_token(name, seed):
    rows = draw(seed)
    found = LOSSES[name](tensors(rows)).loss.item()
    assert found == pytest.approx(reference(rows, LOSSES[name]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_gradient_is_that_of_the_formula_by_small_differences(name, seed):
    rows = draw(seed)
    inputs = tensors(rows)
    LOSSES[name](inputs).loss.backward()
    assert inputs.logprobs_N.grad is not None
    for n, row in enumerate(rows):
        around = []
        for step in (1e-6, -1e-6):
            moved = [{**r, "now": r["now"] + step} if r is row else r for r in rows]
            around.append(reference(moved, LOSSES[name]))
        slope = (around[0] - around[1]) / 2e-6
        assert inputs.logprobs_N.grad[n].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


# One trajectory of ratio exp(-0.5), advantage -1, weights 1/4: the clip's lower bound holds two tokens at 0.8.
def test_golden_numbers_of_a_trajectory_that_is_left_out():
    row = {"now": -1.0, "ref": -1.5, "entropy": 2.0, "correction": 0.5, "advantage": -1.0, "weight": 0.25}
    rows = [{**row, "old": -1.0 + x, "trajectory": 0} for x in (0.5, 0.5, 0.0, 0.0)]
    kept, out = (PolicyLoss(opsm_delta=delta)(tensors(rows)).loss.item() for delta in (0.3, 0.2))
    assert kept == pytest.approx(0.25 * 0.5 * (0.8 + 0.8 + 1 + 1))
    assert out == 0
    both = PolicyLoss(opsm_delta=0.2, entropy_coef=0.1, kl_coef=0.2, kl_kind="k2")(tensors(rows)).loss.item()
    assert both == pytest.approx(-0.1 * 2.0 + 0.2 * 0.125)


def test_golden_numbers_of_the_supervised_loss():
    weights = [0.5, 0.25, 0.0, 0.25]
    inputs = tensors([{**draw(0)[n], "now": -float(n), "weight": w} for n, w in enumerate(weights)])
    output = SftLoss()(inputs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.25 * 1 + 0.25 * 3)
    assert inputs.logprobs_N.grad is not None
    assert inputs.logprobs_N.grad.tolist() == [-0.5, -0.25, 0.0, -0.25]


# Log-ratios 0.5, -1 and 2 of one trajectory, 0.1 of another; products e^1.5 and e^0.1.
@pytest.mark.parametrize(
    ("preset", "weights", "kept"),
    [
        ("none", [1, 1, 1, 1], [1, 1, 1, 1]),
        ("tis", [math.exp(0.5), math.exp(-1), 2.0, math.exp(0.1)], [1, 1, 1, 1]),
        ("mis", [0, 0, 0, math.exp(0.1)], [0, 0, 0, 1]),
        ("icepop", [math.exp(0.5), 0, 0, math.exp(0.1)], [1, 0, 0, 1]),
        ("rejection", [0, 0, 0, 1], [0, 0, 0, 1]),
        ("decoupled_ppo", [math.exp(0.5), math.exp(-1), math.exp(2), math.exp(0.1)], [1, 1, 1, 1]),
    ],
)
def test_golden_numbers_of_every_preset(preset, weights, kept):
    ratios = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64)
    everything, trajectory = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 0, 1])
    found = correct(
        ratios - 3, ratios * 0 - 3, everything, trajectory, build_correction(CorrectionConfig(preset=preset))
    )
    assert found.weights_R.tolist() == pytest.approx(weights)
    assert found.keep_R.tolist() == [bool(x) for x in kept]


def test_every_preset_has_golden_numbers():
    (marker,) = test_golden_numbers_of_every_preset.pytestmark  # pyright: ignore[reportFunctionMemberAccess]
    assert {case[0] for case in marker.args[1]} == set(PRESETS)


def weights_by_loops(kind, lengths, mask, trajectory, group, step, constant):
    """Each token's weight, as the definitions of the denominators count."""
    sample_of = [b for b, n in enumerate(lengths) for _ in range(n)]
    unit_of = {"tokens": lambda b: 0, "sequences": lambda b: b, "prompts": lambda b: group[b]}.get(
        kind, lambda b: trajectory[b]
    )
    found = []
    for b, m in zip(sample_of, mask, strict=True):
        alive = [c for c, n in zip(sample_of, mask, strict=True) if n and step[c] == step[b]]
        size = constant if kind == "constant" else sum(unit_of(c) == unit_of(b) for c in alive)
        found.append(1 / (size * len({unit_of(c) for c in alive})) if m else 0.0)
    return found


@pytest.mark.parametrize("kind", ["trajectories", "sequences", "prompts", "tokens", "constant"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_every_denominator_is_its_definition(kind, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    lengths, trajectory = rng.integers(0, 5, count), np.sort(rng.integers(0, 4, count))
    group, step = trajectory // 2, trajectory % 2
    mask = (rng.random(lengths.sum()) < 0.7).astype(np.float32)
    found = Denominator(kind=kind, constant=7.0).token_weights(
        mask,
        np.repeat(np.arange(count), lengths),
        trajectory,
        [np.flatnonzero(step == s) for s in (0, 1)],
        group_B=group,
    )
    expected = weights_by_loops(
        kind, lengths.tolist(), mask.tolist(), trajectory.tolist(), group.tolist(), step.tolist(), 7.0
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def shares(losses, mask, splits, kind="tokens", lengths=None):
    """The loss of each part of a split, with weights over the whole batch's denominator."""
    lengths = lengths or [len(losses)]
    sample_R = np.repeat(np.arange(len(lengths)), lengths)
    weights = Denominator(kind=kind).token_weights(
        np.asarray(mask, np.float32), sample_R, np.arange(len(lengths)), [np.arange(len(lengths))]
    )
    terms = weights * np.asarray(losses)
    return [[float(terms[list(part)].sum()) for part in split] for split in splits]


# Case B36: one valid token, its sequence on one rank of context or over two; the shard without a valid token adds 0.
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_valid_token_weighs_the_same_however_its_sequence_is_sliced(layout):
    places = [[[t for t in part.tolist() if t >= 0] for part in CpSlices.of([4], n, layout).tokens_L] for n in (1, 2)]
    whole, sliced = shares([3.0, 0.0, 0.0, 0.0], [1, 0, 0, 0], places)
    assert whole == [3.0]
    assert sliced == [3.0, 0.0]


# Case B22: negative log-probs 1, 1 and 3 of two samples, in one micro-batch or in two.
def test_an_auxiliary_term_is_over_the_tokens_of_the_whole_step():
    one, two = shares([1.0, 1.0, 3.0], [1, 1, 1], [[range(3)], [range(2), [2]]], lengths=[2, 1])
    assert one == pytest.approx([5 / 3])
    assert two == pytest.approx([2 / 3, 1.0])


# Case B39: four copies of the same sample, in one step or accumulated.
def test_four_accumulated_micro_batches_add_up_to_one():
    one, four = shares(
        [2.0] * 8, [1] * 8, [[range(8)], [range(2 * i, 2 * i + 2) for i in range(4)]], "trajectories", [2] * 4
    )
    assert one == pytest.approx([2.0])
    assert four == pytest.approx([0.5] * 4)
