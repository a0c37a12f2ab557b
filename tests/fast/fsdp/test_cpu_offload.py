"""Weights, gradients and moments in the CPU's memory, on a CPU: the results are those without; tests/fast-gpu has the rest."""

import pytest

from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_samples,
    open_worker,
    weights_of,
)


def config_of(folder, *, cpu_offload, algorithm=None, **train):
    return make_config(
        folder,
        train={"max_tokens_per_gpu": 24, "num_steps_per_rollout": 2, "cpu_offload": cpu_offload, **train},
        parity={"enabled": False},
        algorithm=dict(algorithm or {}),
    )


def trained(config, tmp_path):
    with open_worker(config, tmp_path) as worker:
        worker.warm_up()
        metrics = [worker.train(make_batch(make_samples(8, seed=step)), step) for step in range(2)]
        scores = worker.score([s["tokens"] for s in make_samples(3)], 0.9)
        return {k: v for k, v in metrics[-1].items() if k.startswith("train/")}, weights_of(worker), scores


@pytest.mark.parametrize(
    ("train", "algorithm"),
    [
        ({"bf16": True}, {"entropy_coef": 0.01}),
        ({"recompute": "full"}, {}),
        ({"bf16": True}, {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.1}),
    ],
)
def test_it_changes_no_bit(model_folder, tmp_path, train, algorithm):
    plain, offloaded = (
        trained(config_of(model_folder, cpu_offload=on, algorithm=algorithm, **train), tmp_path)
        for on in (False, True)
    )
    assert offloaded[0] == plain[0]
    assert largest_difference(offloaded[1], plain[1]) == 0
    assert offloaded[2] == plain[2]


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_goes_on_with_it_or_without(model_folder, tmp_path, before):
    with open_worker(config_of(model_folder, cpu_offload=before), tmp_path) as worker:
        worker.train(make_batch(make_samples()), 0)
        worker.copy_state()
        whole = worker.train(make_batch(make_samples(seed=1)), 1)
        worker.write_copy(str(tmp_path / "saved"))
        kept = weights_of(worker)
    with open_worker(config_of(model_folder, cpu_offload=not before), tmp_path) as worker:
        worker.load(str(tmp_path / "saved"))
        assert worker.train(make_batch(make_samples(seed=1)), 1)["train/grad_norm"] == whole["train/grad_norm"]
        assert largest_difference(weights_of(worker), kept) == 0
