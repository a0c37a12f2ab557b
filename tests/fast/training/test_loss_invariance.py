"""Loss and gradient of a small bigram model do not depend on how a batch is split, ordered or padded."""

import numpy as np
import pytest
import torch

from miles.backends.training_utils.advantages import grpo_advantages
from miles.backends.training_utils.log_probs import token_log_probs
from miles.backends.training_utils.loss import build_loss, token_weights
from miles.backends.training_utils.loss_hub.records import LossInputs
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.packing import FlatBatch
from miles.backends.training_utils.schedule import plan_steps
from miles.config.schema import AlgorithmConfig

V, D = 9, 6
ALGORITHMS = {
    "policy": AlgorithmConfig(eps_clip=0.05, eps_clip_high=0.1, eps_clip_c=2.0, entropy_coef=0.05),
    "policy with kl": AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="low_var_kl"),
    "policy per token": AlgorithmConfig(calculate_per_token_loss=True, entropy_coef=0.05),
    "sft": AlgorithmConfig(loss_type="sft_loss"),
    "sft per token": AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True),
}


def make_samples(seed=0, trajectories=6):
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(trajectories):
        for _ in range(int(rng.integers(1, 3))):
            prompt, response = int(rng.integers(1, 5)), int(rng.integers(1, 8))
            samples.append(
                {
                    "tokens": rng.integers(0, V, prompt + response),
                    "mask": (rng.random(response) < 0.7).astype(np.float32),
                    "old": -rng.random(response),
                    "ref": -rng.random(response),
                    "reward": float(rng.normal()),
                    "trajectory": number,
                }
            )
    return samples


def run(samples, algorithm, *, max_tokens=10**6, ranks=1):
    """Loss, gradients and metrics of one optimizer step, as the trainer computes them."""
    generator = torch.Generator().manual_seed(7)
    embed = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    total = np.array([len(s["tokens"]) for s in samples])
    response = np.array([len(s["mask"]) for s in samples])
    packed = FlatBatch(
        np.concatenate([s["tokens"] for s in samples]),
        total,
        response,
        np.concatenate([s["mask"] for s in samples]),
        np.arange(len(samples)),
    )
    trajectory = np.array([s["trajectory"] for s in samples])
    (step,) = plan_steps(
        trajectory,
        total,
        packed.trainable_B,
        global_batch_size=None,
        num_steps=None,
        world_size=ranks,
        max_tokens=max_tokens,
    )
    weights = torch.from_numpy(
        token_weights(
            packed.mask_R,
            packed.sample_of_R,
            trajectory,
            [step.samples],
            per_token=algorithm.calculate_per_token_loss,
        )
    ).double()
    columns = {
        "old_logprobs_N": torch.from_numpy(np.concatenate([s["old"] for s in samples])),
        "advantages_N": grpo_advantages(
            torch.tensor([s["reward"] for s in samples], dtype=torch.float64), torch.from_numpy(packed.sample_of_R)
        ),
    }
    if algorithm.use_kl_loss:
        columns["ref_logprobs_N"] = torch.from_numpy(np.concatenate([s["ref"] for s in samples]))
    loss_fn, loss, metrics = build_loss(algorithm), 0.0, StepMetrics()
    for part in (p for rank in step.micro_batches for p in rank):
        batch = packed.micro_batch(part)
        hidden = embed[batch.input_ids_BT].flatten(0, 1)[batch.positions_N]
        logprobs, entropy = token_log_probs(hidden, head, batch.targets_N, 0.8)
        output = loss_fn(
            LossInputs(
                logprobs_N=logprobs,
                entropy_N=entropy,
                weights_N=weights[batch.entries_N],
                **{name: values[batch.entries_N] for name, values in columns.items()},
            )
        )
        output.loss.backward()
        loss += float(output.loss.detach())
        metrics.add(output)
    return loss, torch.cat([embed.grad.flatten(), head.grad.flatten()]), metrics.reduce()


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], abs=1e-7)
    assert float((one[1] - other[1]).abs().max()) < 1e-6
    assert one[2] == pytest.approx(other[2], abs=1e-6)
    assert float(one[1].abs().max()) > 1e-3


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return ALGORITHMS[request.param]


@pytest.mark.parametrize("max_tokens", [12, 25, 60])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_micro_batches_and_ranks_change_nothing(algorithm, max_tokens, ranks):
    samples = make_samples()
    assert_same(run(samples, algorithm), run(samples, algorithm, max_tokens=max_tokens, ranks=ranks))


def test_order_changes_nothing(algorithm):
    samples = make_samples()
    shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
    assert_same(run(samples, algorithm, max_tokens=30), run(shuffled, algorithm, max_tokens=30))


def test_a_long_neighbour_changes_only_padding(algorithm):
    samples = make_samples()
    masked = {**samples[0], "tokens": np.zeros(40, dtype=np.int64), "mask": np.zeros(39, np.float32), "trajectory": 99}
    masked |= {"old": np.full(39, np.nan), "ref": np.full(39, np.nan)}
    one = run(samples, algorithm)
    assert_same(one, run([*samples, masked], algorithm))
    masked["mask"][-1] = 1
    masked["old"][:], masked["ref"][:] = 0, 0
    assert_same(run([*samples, masked], algorithm, max_tokens=40), run([*samples, masked], algorithm))


def test_splitting_a_trajectory_into_siblings_changes_nothing(algorithm):
    samples = make_samples()
    number, whole = next((i, s) for i, s in enumerate(samples) if len(s["mask"]) >= 4)
    prompt = len(whole["tokens"]) - len(whole["mask"])
    cut = 2
    first = {**whole, "tokens": whole["tokens"][: prompt + cut]}
    second = {**whole}
    for key in ("mask", "old", "ref"):
        first[key], second[key] = whole[key][:cut], whole[key][cut:]
    split = [*samples[:number], first, second, *samples[number + 1 :]]
    assert_same(run(samples, algorithm), run(split, algorithm, max_tokens=40))


def test_doubling_the_batch_with_copies_changes_nothing(algorithm):
    samples = make_samples()
    copies = [{**s, "trajectory": s["trajectory"] + 100} for s in samples]
    one, two = run(samples, algorithm), run([*samples, *copies], algorithm, max_tokens=50)
    assert one[0] == pytest.approx(two[0], abs=1e-7)
    assert float((one[1] - two[1]).abs().max()) < 1e-6


def test_a_group_without_variance_pulls_nowhere():
    samples = [{**s, "reward": 0.0} for s in make_samples()]
    loss, gradient, _ = run(samples, AlgorithmConfig())
    assert loss == 0
    assert float(gradient.abs().max()) == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_without_trainable_token_has_zero_loss_and_gradient(name):
    samples = [{**s, "mask": np.zeros_like(s["mask"])} for s in make_samples()]
    loss, gradient, metrics = run(samples, ALGORITHMS[name])
    assert loss == 0
    assert float(gradient.abs().max()) == 0
    assert metrics["trainable_tokens"] == 0
    assert all(np.isfinite(v) for v in metrics.values())
