"""Where old log-probs come from, and what the pass that makes them reports."""

import json

import numpy as np
import pytest

from miles.core.run_facts import RunFacts
from miles.errors import ParityError, TrainingError
from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_samples,
    make_split_samples,
    open_worker,
    scored_batch,
    weights_of,
    with_log_probs,
)
from tests.fast.fsdp.test_losses import GRADIENT_AS_UPDATE, OFF, train

SKIP = {"skip_actor_forward_only": True}


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "cispo", "sapo", "dppo"])
def test_without_its_pass_the_first_step_is_the_same(model_folder, tmp_path, name):
    samples = make_split_samples()
    algorithm = {"advantage_estimator": name, "use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": 0.2}
    expected, weights = train(model_folder, tmp_path, samples, algorithm=dict(algorithm))
    for tokens in (4096, 14):  # in the second case trajectories lie in several micro-batches
        found, others = train(
            model_folder, tmp_path, samples, algorithm={**algorithm, **SKIP}, train={"max_tokens_per_gpu": tokens}
        )
        assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
        assert largest_difference(weights, others) <= 1e-6
        assert found["train/ppo_kl"] == 0
        assert found["train/ratio_max"] == 1
        assert "perf/log_probs_time" not in found
        for metric in ("train_rollout_logprob_abs_diff", "mis_k3"):
            assert found[f"train/{metric}"] == pytest.approx(expected[f"train/{metric}"], rel=1e-4)
    assert expected["train/grad_norm"] > 1e-3


def test_parity_is_checked_with_the_steps_own_log_probs_before_the_weights_move(model_folder, tmp_path):
    config = make_config(model_folder, algorithm=dict(SKIP))
    with open_worker(config, tmp_path) as worker:
        metrics = worker.train(scored_batch(worker, make_samples()), 0)
        assert 0 <= metrics["train/rollout_logprob_abs_diff_p99"] < 1e-4
        before = weights_of(worker)
        scores = worker.score([s["tokens"] for s in make_samples()], 1.0)
        wrong = [[x - 0.5 for x in row] for row in scores]
        with pytest.raises(ParityError, match="rollout step 1"):
            worker.train(make_batch(with_log_probs(make_samples(), wrong)), 1)
        assert largest_difference(before, weights_of(worker)) == 0
        assert all(parameter.grad is None for parameter in worker._roles.policy.parameters())


def test_nan_from_the_policy_names_the_sample(model_folder, tmp_path, monkeypatch):
    config = make_config(model_folder, algorithm=dict(SKIP), parity=dict(OFF))
    with open_worker(config, tmp_path) as worker:
        batch = scored_batch(worker, make_samples())
        forward = worker._steps._forward
        monkeypatch.setattr(worker._steps, "_forward", lambda part: tuple(x * float("nan") for x in forward(part)))
        with pytest.raises(TrainingError, match=r"the trainer's log-prob is nan.*samples 500"):
            worker.train(batch, 0)


def test_a_batch_of_several_steps_is_refused_when_the_pass_is_left_out(model_folder, tmp_path):
    config = make_config(
        model_folder,
        algorithm=dict(SKIP),
        parity=dict(OFF),
        rollout={"batch_size": 4, "n_samples_per_prompt": 1},
        train={"global_batch_size": 4},
    )
    with open_worker(config, tmp_path) as worker:
        batch = scored_batch(worker, make_samples(8))
        with pytest.raises(TrainingError, match=r"makes 2 optimizer steps.*\n    fix: --use-dynamic"):
            worker.train(batch, 0)


@pytest.mark.parametrize("more", [{}, {"use_rollout_logprobs": True}])
def test_entropy_before_the_first_step_comes_from_the_pass_that_makes_old_log_probs(model_folder, tmp_path, more):
    samples = make_samples()
    algorithm = {"use_rollout_entropy": True, "observe_training_entropy": True, "calculate_per_token_loss": True}
    found, _ = train(model_folder, tmp_path, samples, algorithm={**algorithm, **more})
    assert found["perf/log_probs_time"] > 0
    assert found["train/rollout_entropy"] == pytest.approx(found["train/entropy_loss"], rel=1e-5)
    assert 1 < found["train/rollout_entropy"] < np.log(24)
    without, _ = train(model_folder, tmp_path, samples)
    assert "train/rollout_entropy" not in without


def remember(args, rollout_data):
    with open(f"{args.run_dir}/seen.json", "w") as file:
        json.dump(
            {"run_dir": args.run_dir, "start": args.start_rollout_id, "whitens": args.normalize_advantages}, file
        )
    rollout_data["advantages"] = [row * 0 + 1 for row in rollout_data["loss_masks"]]


def test_hooks_of_the_trainer_see_the_facts_of_the_run(model_folder, tmp_path):
    algorithm = {"custom_advantage_function_path": f"{__name__}.remember"}
    config = make_config(model_folder, algorithm=algorithm, parity=dict(OFF), optimizer=dict(GRADIENT_AS_UPDATE))
    assert config.run.dir is None
    with open_worker(config, tmp_path, facts=RunFacts(run_dir=str(tmp_path), start_rollout_id=7)) as worker:
        worker.train(scored_batch(worker, make_samples()), 7)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == {"run_dir": str(tmp_path), "start": 7, "whitens": False}
