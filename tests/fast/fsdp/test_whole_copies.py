from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from miles.backends.fsdp_utils import critic, model, roles
from miles.backends.fsdp_utils.model import hf_tensors, load_policy, release_gathered, shard
from miles.backends.fsdp_utils.whole_copies import WholeCopies
from miles.backends.training_utils.packing import FlatBatch
from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_model_folder,
    make_samples,
    open_worker,
    weights_of,
)


@pytest.fixture
def alone(monkeypatch):
    for module in (roles, critic):
        monkeypatch.setattr(module, "keeps_gathered", lambda config: True)


def trained(folder, tmp_path, train, algorithm):
    config = make_config(
        folder,
        train={"max_tokens_per_gpu": 24, "num_steps_per_rollout": 2, **train},
        parity={"enabled": False},
        algorithm=algorithm,
    )
    with open_worker(config, tmp_path) as worker:
        metrics = [worker.train(make_batch(make_samples(8, seed=step)), step) for step in range(2)]
        scores = worker.score([s["tokens"] for s in make_samples(3)], 0.9)
        assert (worker._roles.policy.copies is not None) == (roles.keeps_gathered(config))
        found = {k: v for k, v in metrics[-1].items() if k.startswith("train/")}
        return found, weights_of(worker), scores


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("train", [{"bf16": True}, {}, {"bf16": True, "recompute": "selective"}])
def test_copies_compute_what_fsdp_does_to_the_bit(tmp_path, request, train, tied):
    folder = make_model_folder(tmp_path / "model", tied=tied)
    algorithm = {"entropy_coef": 0.01}
    expected = trained(folder, tmp_path, train, algorithm)
    request.getfixturevalue("alone")
    found = trained(folder, tmp_path, train, algorithm)
    assert found[0] == expected[0]
    assert largest_difference(found[1], expected[1]) == 0
    assert found[2] == expected[2]


def test_a_critic_and_a_reference_beside_it_too(model_folder, tmp_path, request):
    algorithm = {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.1}
    expected = trained(model_folder, tmp_path, {"bf16": True}, algorithm)
    request.getfixturevalue("alone")
    found = trained(model_folder, tmp_path, {"bf16": True}, algorithm)
    assert "train/value_loss" in found[0]
    assert found[0] == expected[0]
    assert largest_difference(found[1], expected[1]) == 0


def test_between_passes_the_parameters_are_there_and_no_copy_has_memory(model_folder, tmp_path, alone):
    config = make_config(model_folder, train={"bf16": True, "max_tokens_per_gpu": 24}, parity={"enabled": False})
    seen = []

    class Watched(WholeCopies):
        def _before_forward(self, model, inputs):
            seen.append(self._storage.nbytes() > 0)
            super()._before_forward(model, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("miles.backends.fsdp_utils.model.WholeCopies", Watched)
        with open_worker(config, tmp_path) as worker:
            policy = worker._roles.policy
            before = {name: id(tensor) for name, tensor in hf_tensors(policy).items()}
            seen.clear()
            worker.train(make_batch(make_samples(8)), 0)
            # The first forward pass of the scoring makes them, later micro-batches find them; so does each optimizer step.
            assert seen.count(False) == 2
            assert seen.count(True) >= 4
            worker.score([[1, 2, 3]], 1.0)
            after = hf_tensors(policy)
            assert {name: id(tensor) for name, tensor in after.items()} == before
            assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in policy.parameters())
            assert policy.copies is not None
            assert policy.copies._storage.nbytes() == 0


def test_copies_of_a_pass_that_failed_are_given_up_by_hand(model_folder, tmp_path, alone, monkeypatch):
    config = make_config(model_folder, train={"bf16": True}, parity={"enabled": False})
    with open_worker(config, tmp_path) as worker:
        policy = worker._roles.policy
        with monkeypatch.context() as patch:
            patch.setattr("miles.backends.fsdp_utils.model.linear_log_softmax", lambda *a, **k: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                worker.score([[1, 2, 3]], 1.0)
        release_gathered(policy)
        assert all(isinstance(p, DTensor) for p in policy.parameters())
        assert worker.score([[1, 2, 3]], 1.0)[0][1] < 0


def test_a_backward_pass_that_failed_adds_nothing_to_the_next(model_folder, tmp_path, alone):
    part = FlatBatch.from_sequences([[1, 2, 3, 4]]).micro_batch(np.arange(1))
    config = make_config(model_folder, train={"bf16": True}, parity={"enabled": False})

    def gradients(policy):
        (logprobs_N,) = policy(part, 1.0)
        logprobs_N.sum().backward()
        return [parameter.grad.to_local().clone() for parameter in policy.parameters()]

    with open_worker(config, tmp_path) as worker:
        policy = worker._roles.policy
        expected = gradients(policy)
        worker._roles.optimizer.zero_grad()
        assert policy.copies is not None
        # The embedding's gradient comes last, when others are there already.
        handle = policy.copies._copies[0].register_hook(lambda grad: 1 / 0)
        (logprobs_N,) = policy(part, 1.0)
        with pytest.raises(ZeroDivisionError):
            logprobs_N.sum().backward()
        assert any(copy.grad is not None for copy in policy.copies._copies)
        handle.remove()
        found = gradients(policy)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_several_ranks_shard_whatever_the_settings_say(model_folder, monkeypatch):
    policy, _ = load_policy(model_folder)
    sharded = []
    monkeypatch.setattr(model, "fully_shard", lambda module, **settings: sharded.append(module))
    shard(policy, SimpleNamespace(size=lambda: 2, device_type="cpu"), keeps_gathered=True)
    assert policy.copies is None
    assert sharded[-1] is policy
