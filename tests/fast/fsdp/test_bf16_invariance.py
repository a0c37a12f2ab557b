"""Loss and gradient of a model that computes in bf16, over fp32 weights, however the work is split."""

import numpy as np
import pytest
import torch

from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_samples,
    open_worker,
    weights_of,
    with_log_probs,
)
from tests.fast.fsdp.test_losses import ALGORITHMS, CASES

BOUND = 2e-3
STILL = {"lr": 1e-30, "adam_beta1": 0.0, "clip_grad": 0.0, "weight_decay": 0.0}
"""So small a rate moves no weight of fp32, so one worker can do the same work twice; AdamW's first moment is the gradient."""
SFT = {"advantage_estimator": "grpo", "loss_type": "sft_loss"}
PPO = {"advantage_estimator": "ppo", "lambd": 0.9, "gamma": 0.9}
LOSSES = {**CASES, "sft": {"algorithm": SFT}, "ppo": {"algorithm": PPO}}
BY_DEFINITION = "sequences"
"""This denominator weighs samples, so splitting one is meant to matter."""


@pytest.fixture(scope="module")
def samples(model_folder, tmp_path_factory):
    """Trajectories of six groups, with log-probs of an engine that is off by 0.3 nats."""
    tmp_path = tmp_path_factory.mktemp("scores")
    made = [{**s, "group_index": s["trajectory"] // 2} for s in make_samples(12)]
    with open_worker(make_config(model_folder), tmp_path) as worker:
        scores = worker.score([s["tokens"] for s in made], 1.0)
    rng = np.random.default_rng(5)
    return with_log_probs(made, [[min(x + float(rng.normal(0, 0.3)), -1e-3) for x in row] for row in scores])


def halves(sample):
    """The sample as two of its trajectory: a response up to the middle, and the rest of it."""
    size = len(sample["loss_mask"])
    middle = size // 2
    parts = []
    for start, stop in ((0, middle), (middle, size)):
        rows = {name: sample[name][start:stop] for name in ("loss_mask", "rollout_log_probs")}
        parts.append({**sample, **rows, "tokens": sample["tokens"][: len(sample["tokens"]) - size + stop]})
    return parts


def differences(model_folder, tmp_path, name, whole, split, max_tokens):
    """How far loss and norms of the split work are from those of the whole, relative; and how far the gradient is."""
    sections = {key: dict(value) for key, value in LOSSES[name].items()}
    if "correction" not in sections:
        sections["algorithm"]["use_rollout_logprobs"] = True  # so that ratios are not 1
    settings = {"bf16": True, "max_tokens_per_gpu": 8192}
    config = make_config(
        model_folder, **sections, parity={"enabled": False}, optimizer=dict(STILL), train=dict(settings)
    )
    with open_worker(config, tmp_path) as worker:
        if name == "ppo":
            head = worker._roles.critic._model.value_head.to_local()
            with torch.no_grad():
                head.copy_(torch.linspace(-0.1, 0.1, head.numel())[None])
        before = weights_of(worker)
        one, gradient = worker.train(make_batch(whole), 0), gradient_of(worker)
        train = config.train.model_copy(update={"max_tokens_per_gpu": max_tokens})
        worker._config = config.model_copy(update={"train": train})
        other, moved = worker.train(make_batch(split), 1), gradient_of(worker)
        assert largest_difference(before, weights_of(worker)) == 0
    assert one["train/grad_norm"] > 1e-3
    kept = [k for k in ("loss", "grad_norm", "value_loss", "critic_grad_norm") if f"train/{k}" in one]
    found = {k: abs(other[f"train/{k}"] / one[f"train/{k}"] - 1) for k in kept}
    return found, float((moved - gradient).norm() / gradient.norm())


def gradient_of(worker):
    moments = worker._roles.optimizer.moments()
    return torch.cat([moments[key].to_local().flatten() for key in sorted(moments) if "exp_avg." in key])


# Micro-batches no larger than the longest sample, other packs, accumulation, order, and trajectories in two samples, all at once.
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_norm_do_not_depend_on_the_split(model_folder, tmp_path, samples, name):
    split = samples if name == BY_DEFINITION else [part for s in samples for part in halves(s)]
    found, _ = differences(model_folder, tmp_path, name, samples, split, 14)
    assert max(found.values()) <= BOUND, found


@pytest.mark.parametrize("tokens", [14, 60])
@pytest.mark.parametrize("name", ["grpo", "gspo", "opsm", "hook"])
def test_each_size_of_micro_batch_gives_the_same(model_folder, tmp_path, samples, name, tokens):
    found, direction = differences(model_folder, tmp_path, name, samples, samples, tokens)
    assert max(found.values()) <= BOUND, found
    assert 0 < direction < 1e-2  # rounding; see test_doctor_rounding


def test_the_algorithms_of_the_estimators_are_all_among_the_losses():
    assert {value.get("advantage_estimator") for value in ALGORITHMS.values()} | {"ppo"} >= {
        "grpo", "gspo", "dr_grpo", "dapo", "cispo", "sapo", "gmpo", "dppo", "rloo", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "ppo",
    }  # fmt: skip
