import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.loss_hub.denominators import Denominator
from miles.backends.training_utils.loss_hub.value_loss import ValueInputs, ValueLoss, explained_variance
from miles.backends.training_utils.metrics import StepMetrics


def inputs(values, old, returns, weights):
    columns = {"values_N": values, "old_values_N": old, "returns_N": returns, "weights_N": weights}
    return ValueInputs(**{name: torch.as_tensor(x, dtype=torch.float64) for name, x in columns.items()})


def reference(values, old, returns, weights, clip):
    """Loss, gradient and clipped share, token by token."""
    loss, gradient, clipped = 0.0, [], []
    for v, o, r, w in zip(values, old, returns, weights, strict=True):
        bounded = min(max(v, o - clip), o + clip)
        plain, other = (v - r) ** 2, (bounded - r) ** 2
        inside = o - clip < v < o + clip
        loss += w * max(plain, other)
        gradient.append(w * 2 * (v - r) if plain > other or inside else 0.0)
        clipped += [other > plain] if w else []
    return loss, gradient, np.mean(clipped)


def draw(seed, tokens=12):
    rng = np.random.default_rng(seed)
    values, old, returns = rng.normal(size=(3, tokens))
    weights = rng.random(tokens) * (rng.random(tokens) < 0.7)
    weights[0] = 0.5
    return values, old, returns, weights


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 2))
def test_loss_gradient_and_clipped_share_are_the_definitions(seed, clip):
    values, old, returns, weights = draw(seed)
    found = inputs(values, old, returns, weights)
    found.values_N.requires_grad_(True)
    output = ValueLoss(clip)(found)
    output.loss.backward()
    loss, gradient, clipped = reference(values, old, returns, weights, clip)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(found.values_N.grad, gradient, rtol=1e-12, atol=1e-15)
    assert float(output.metrics().token_sums["value_clipfrac"]) / output.metrics().num_tokens == pytest.approx(clipped)
    assert output.metrics().weighted["value_loss"].item() == output.loss.item()


@pytest.mark.parametrize(
    ("value", "old", "returned", "loss", "slope", "clipped"),
    [
        (0.1, 0.0, 1.0, 0.81, -1.8, 0),  # within the clip: the square alone, without 1/2
        (0.5, 0.0, 1.0, 0.64, 0.0, 1),  # went beyond the clip towards its return: held
        (-0.5, 0.0, 1.0, 2.25, -3.0, 0),  # went away from its return: pulled back
        (0.9, 0.0, 0.1, 0.64, 1.6, 0),  # went past its return: pulled back
        (0.0, 0.0, 1.0, 1.0, -2.0, 0),  # the first optimizer step
    ],
)
def test_golden_numbers(value, old, returned, loss, slope, clipped):
    found = inputs([value], [old], [returned], [1.0])
    found.values_N.requires_grad_(True)
    output = ValueLoss(0.2)(found)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss)
    assert found.values_N.grad.tolist() == pytest.approx([slope])
    assert int(output.metrics().token_sums["value_clipfrac"]) == clipped


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e30])
def test_masked_tokens_change_nothing_whatever_they_hold(odd):
    clean = inputs([0.5, 0.3], [0.1, 0.2], [1.0, 0.0], [1.0, 0.0])
    dirty = inputs([0.5, odd], [0.1, odd], [1.0, odd], [1.0, 0.0])
    results = []
    for each in (clean, dirty):
        each.values_N.requires_grad_(True)
        output = ValueLoss(0.2)(each)
        output.loss.backward()
        results.append((output.loss.item(), each.values_N.grad.tolist(), output.metrics().num_tokens))
    assert results[0] == results[1]
    assert results[0][2] == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from(["trajectories", "tokens", "sequences"]))
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches_or_ranks(seed, parts, kind):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 6)
    sample_R = np.repeat(np.arange(6), lengths)
    mask_R = (rng.random(len(sample_R)) < 0.8).astype(np.float32)
    mask_R[0] = 1
    trajectory_B = np.array([0, 0, 1, 2, 2, 3])
    weights_R = Denominator(kind=kind).token_weights(mask_R, sample_R, trajectory_B, [np.arange(6)])
    features = torch.tensor(rng.normal(size=(len(sample_R), 3)))
    old, returns = (torch.tensor(rng.normal(size=len(sample_R))) for _ in range(2))
    owner_R = rng.integers(0, parts, 6)[sample_R]

    def run(pieces):
        head = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
        metrics = StepMetrics()
        for piece in pieces:
            output = ValueLoss(0.3)(inputs(features[piece] @ head, old[piece], returns[piece], weights_R[piece]))
            metrics.add(output)
            output.loss.backward()
        return metrics.reduce(), head.grad

    whole, gradient = run([np.arange(len(sample_R))])
    split, other = run([np.flatnonzero(owner_R == part) for part in range(parts)])
    assert split == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(other, gradient, rtol=1e-12, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["trajectories", "tokens", "prompts", "constant"]))
def test_splitting_a_trajectory_into_samples_changes_neither_loss_nor_gradient(seed, kind):
    rng = np.random.default_rng(seed)
    lengths, trajectory_B = rng.integers(2, 6, 4), np.array([0, 1, 2, 2])
    cuts = np.array([int(rng.integers(1, n)) for n in lengths])
    pieces = np.stack([cuts, lengths - cuts], axis=1).reshape(-1)
    mask_R = (rng.random(lengths.sum()) < 0.8).astype(np.float32)
    values, old, returns = (torch.tensor(rng.normal(size=lengths.sum())) for _ in range(3))
    results = []
    for sizes, trajectory in ((lengths, trajectory_B), (pieces, np.repeat(trajectory_B, 2))):
        samples = np.arange(len(sizes))
        weights_R = Denominator(kind=kind, constant=9.0).token_weights(
            mask_R, np.repeat(samples, sizes), trajectory, [samples], group_B=trajectory // 2
        )
        found = inputs(values, old, returns, weights_R)
        found.values_N.requires_grad_(True)
        output = ValueLoss(0.3)(found)
        results.append((output.loss.item(), torch.autograd.grad(output.loss, found.values_N)[0]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-14)


def test_explained_variance_is_one_of_foresight_and_none_without_anything_to_explain():
    returns, all_of = torch.tensor([0.0, 1.0, 2.0, 9.0]), torch.ones(4, dtype=torch.bool)
    assert explained_variance(returns, returns, all_of) == 1
    assert explained_variance(torch.full((4,), 3.0), returns, all_of) == pytest.approx(0)
    assert explained_variance(-returns, returns, all_of) == pytest.approx(-3)
    some = torch.tensor([True, True, True, False])
    values = torch.tensor([0.5, 0.5, 2.0, float("nan")])
    assert explained_variance(values, returns, some) == pytest.approx(1 - np.var([-0.5, 0.5, 0]) / np.var([0, 1, 2]))
    assert explained_variance(values, torch.ones(4), some) is None
    assert explained_variance(values, returns, ~all_of) is None
