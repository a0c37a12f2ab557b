import json

import numpy as np
import pytest

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from miles.backends.fsdp_utils.passes import Passes
from miles.errors import HookError, TrainingError
from tests.fast.fsdp.ranks import play_all
from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_model_folder,
    make_samples,
    make_split_samples,
    open_worker,
    weights_of,
    with_log_probs,
)

HOOKS = "tests.fast.fsdp.loss_hooks"
GRADIENT_AS_UPDATE = {"lr": 1.0, "adam_eps": 1.0, "clip_grad": 0.0}
"""With such an epsilon AdamW moves weights by about their gradient, so comparing weights compares gradients."""
OFF = {"enabled": False}


def mismatched_batch(worker, samples, spread=0.3):
    rng = np.random.default_rng(5)
    scores = worker.score([s["tokens"] for s in samples], 1.0)
    noisy = [[min(x + float(rng.normal(0, spread)), -1e-3) for x in row] for row in scores]
    return make_batch(with_log_probs(samples, noisy))


def train(model_folder, tmp_path, samples, spread=0.3, **sections):
    sections = {"parity": dict(OFF), "optimizer": dict(GRADIENT_AS_UPDATE), **sections}
    with open_worker(make_config(model_folder, **sections), tmp_path) as worker:
        metrics = worker.train(mismatched_batch(worker, samples, spread), 0)
        return metrics, weights_of(worker)


ALGORITHMS = {
    name: {"advantage_estimator": name}
    for name in ("grpo", "gspo", "dr_grpo", "dapo", "cispo", "sapo", "gmpo", "dppo", "rloo")
}
ALGORITHMS |= {
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1, "gamma": 0.9},
    "reinforce++ baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
    "custom advantages": {"custom_advantage_function_path": f"{HOOKS}.advantages"},
    "clip higher, dual clip": {"eps_clip": 0.01, "eps_clip_high": 0.02, "eps_clip_c": 1.5},
    "dppo by kl": {"advantage_estimator": "dppo", "dppo_divergence": "kl", "dppo_bound": 0.01},
    "opsm": {"use_opsm": True, "opsm_delta": 0.01},
    "gspo over rloo": {"advantage_estimator": "rloo", "policy_objective": "gspo"},
    "entropy, unbiased kl": {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "prompts": {"loss_denominator": "prompts"},
    "sequences": {"loss_denominator": "sequences"},
    "constant": {"loss_denominator": "constant", "loss_constant": 20},
    "engine's log-probs": {"use_rollout_logprobs": True, "get_mismatch_metrics": True},
    "custom loss": {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}.policy_gradient"},
}  # fmt: skip
CORRECTIONS = {
    "tis": {"use_tis": True},
    "mis": {"preset": "mis", "upper": 4.0},
    "mis geometric clip": {"preset": "mis", "level": "geometric", "mode": "clip"},
    "icepop": {"preset": "icepop", "lower": 0.8, "upper": 1.3},
    "rejection": {"preset": "rejection", "rejection_upper": 3.0, "veto_threshold": 0.01},
    "decoupled ppo": {"preset": "decoupled_ppo"},
    "tis, rejection": {"use_tis": True, "rejection_level": "token", "batch_normalize": True},
    "kept denominator": {"preset": "icepop", "lower": 0.8, "upper": 1.3, "keep_denominator": True},
    "hook": {"custom_tis_function_path": f"{HOOKS}.reject"},
}
CASES = {name: {"algorithm": value} for name, value in ALGORITHMS.items()}
CASES |= {name: {"correction": value} for name, value in CORRECTIONS.items()}
CASES["gspo, mis"] = {"algorithm": {"advantage_estimator": "gspo"}, "correction": {"preset": "mis"}}
CASES["per token, tis"] = {"algorithm": {"calculate_per_token_loss": True}, "correction": {"use_tis": True}}


@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_makes_two_optimizer_steps_that_move_the_weights(model_folder, tmp_path, name):
    sections = {key: dict(value) for key, value in CASES[name].items()}
    config = make_config(
        model_folder, **sections, parity=dict(OFF), train={"num_steps_per_rollout": 2, "max_tokens_per_gpu": 40}
    )
    with open_worker(config, tmp_path) as worker:
        before = weights_of(worker)
        metrics = worker.train(mismatched_batch(worker, make_samples(8), 0.15), 0)
        assert largest_difference(before, weights_of(worker)) > 1e-4
    assert metrics["train/optimizer_steps"] == 2
    assert metrics["train/skipped_steps"] == metrics["train/empty_steps"] == 0
    assert metrics["train/grad_norm"] > 0
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0


@pytest.mark.parametrize("name", ["gspo", "gmpo", "opsm", "entropy, unbiased kl", "dppo", "custom loss"])
def test_a_trajectory_in_several_micro_batches_trains_as_in_one(model_folder, tmp_path, name):
    results = []
    for tokens in (4096, 14):
        algorithm = {**ALGORITHMS[name], "use_rollout_logprobs": True}
        results.append(
            train(
                model_folder,
                tmp_path,
                make_split_samples(),
                algorithm=algorithm,
                train={"max_tokens_per_gpu": tokens},
            )
        )
    (whole, weights), (parts, others) = results
    assert parts["train/loss"] == pytest.approx(whole["train/loss"], abs=1e-6)
    assert parts["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-5)
    assert whole["train/grad_norm"] > 1e-3
    assert largest_difference(weights, others) <= 1e-6


def test_a_custom_loss_given_logits_trains_like_the_unclipped_policy_loss(model_folder, tmp_path):
    samples = make_samples()
    wide = {"eps_clip": 1e6, "use_rollout_logprobs": True}
    mine = {**ALGORITHMS["custom loss"], "use_rollout_logprobs": True}
    rollout = {"temperature": 0.8}
    expected, weights = train(model_folder, tmp_path, samples, algorithm=wide, rollout=dict(rollout))
    found, others = train(
        model_folder, tmp_path, samples, algorithm=mine, rollout=dict(rollout), train={"max_tokens_per_gpu": 20}
    )
    assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    assert largest_difference(weights, others) <= 1e-6
    assert found["train/mean_ratio"] > 0


@pytest.mark.parametrize("name", ["no_gradient", "no_metrics", "odd_metric", "breaks"])
def test_a_custom_loss_that_fails_or_returns_something_else_is_named(model_folder, tmp_path, name):
    algorithm = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}.{name}"}
    with pytest.raises(HookError, match="custom-loss-function-path"):
        train(model_folder, tmp_path, make_samples(), algorithm=algorithm)


def test_a_hook_that_truncates_trains_like_tis(model_folder, tmp_path):
    samples = make_samples()
    expected, weights = train(model_folder, tmp_path, samples, correction={"use_tis": True, "upper": 1.1})
    hook = {"custom_tis_function_path": f"{HOOKS}.truncate", "upper": 1.1}
    found, others = train(model_folder, tmp_path, samples, correction=hook, train={"max_tokens_per_gpu": 20})
    assert largest_difference(weights, others) <= 1e-6
    assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    assert 0 < found["train/hook_weight"] <= 1.1
    assert found["train/hook_number"] == pytest.approx(2.0)


# Case B12, from the hook's masks.
def test_tokens_that_a_hook_rejects_leave_the_denominator(model_folder, tmp_path):
    samples = make_samples()
    same = {"preset": "icepop", "lower": 0.0, "upper": 1.2}
    expected, weights = train(model_folder, tmp_path, samples, correction=same)
    found, others = train(model_folder, tmp_path, samples, correction={"custom_tis_function_path": f"{HOOKS}.reject"})
    assert largest_difference(weights, others) <= 1e-6
    assert found["train/trainable_tokens"] == expected["train/trainable_tokens"]
    assert found["train/trainable_tokens"] < sum(sum(s["loss_mask"]) for s in samples)


@pytest.mark.parametrize("name", ["forget_masks", "forget_metrics", "breaks_too"])
def test_a_hook_that_fails_or_returns_something_else_is_named(model_folder, tmp_path, name):
    with pytest.raises(HookError, match="custom-tis-function-path"):
        train(model_folder, tmp_path, make_samples(), correction={"custom_tis_function_path": f"{HOOKS}.{name}"})


def test_rejected_tokens_can_be_kept_in_the_denominator_and_gradients_are_smaller_then(model_folder, tmp_path):
    samples = [{**s, "loss_mask": [1.0] * len(s["loss_mask"])} for s in make_samples()]
    correction = {"preset": "rejection", "rejection_level": "token", "rejection_upper": 1.3}
    algorithm = {"calculate_per_token_loss": True}
    left, _ = train(model_folder, tmp_path, samples, correction=dict(correction), algorithm=dict(algorithm))
    all_, _ = train(
        model_folder, tmp_path, samples, correction={**correction, "keep_denominator": True}, algorithm=algorithm
    )
    share = left["train/trainable_tokens"] / sum(len(s["loss_mask"]) for s in samples)
    assert 0.1 < share < 0.9
    assert all_["train/grad_norm"] == pytest.approx(left["train/grad_norm"] * share, rel=1e-4)
    assert left["train/mis_rejected"] == pytest.approx(1 - share)


def test_a_batch_that_is_rejected_whole_moves_nothing_and_is_reported(model_folder, tmp_path):
    correction = {"preset": "rejection", "rejection_level": "token", "rejection_upper": 1e9, "rejection_lower": 1e8}
    metrics, _ = train(model_folder, tmp_path, make_samples(), correction=correction)
    assert metrics["train/empty_steps"] == 1
    assert metrics["train/mis_rejected"] == 1


def test_log_probs_of_the_engine_save_the_trainer_s_pass_unless_it_is_needed(model_folder, tmp_path):
    samples = make_samples()
    metrics, _ = train(model_folder, tmp_path, samples, algorithm={"use_rollout_logprobs": True})
    assert "perf/log_probs_time" not in metrics
    assert "train/mis_kl" not in metrics
    assert metrics["train/ppo_kl"] != pytest.approx(0, abs=1e-3)
    metrics, _ = train(
        model_folder, tmp_path, samples, algorithm={"use_rollout_logprobs": True, "get_mismatch_metrics": True}
    )
    assert metrics["perf/log_probs_time"] > 0
    assert metrics["train/mis_kl"] == pytest.approx(metrics["train/ppo_kl"], abs=1e-5)


def test_entropy_is_reported_when_asked_for_and_pulls_only_with_a_coefficient(model_folder, tmp_path):
    samples = make_samples()
    plain, weights = train(model_folder, tmp_path, samples)
    seen, same = train(model_folder, tmp_path, samples, algorithm={"observe_training_entropy": True})
    _, moved = train(model_folder, tmp_path, samples, algorithm={"entropy_coef": 0.5})
    assert "train/entropy_loss" not in plain
    assert 0 < seen["train/entropy_loss"] < np.log(24)
    assert largest_difference(weights, same) == 0
    assert largest_difference(weights, moved) > 1e-3


def test_values_at_masked_tokens_change_nothing(model_folder, tmp_path):
    samples = make_samples()
    samples[0]["loss_mask"] = [1.0, *[0.0] * (len(samples[0]["loss_mask"]) - 1)]
    results = []
    for value in (-1.0, float("nan")):
        config = make_config(model_folder, parity=dict(OFF), correction={"preset": "mis", "level": "geometric"})
        with open_worker(config, tmp_path) as worker:
            rows = with_log_probs(samples, worker.score([s["tokens"] for s in samples], 1.0))
            rows[0]["rollout_log_probs"] = [
                rows[0]["rollout_log_probs"][0],
                *[value] * (len(rows[0]["loss_mask"]) - 1),
            ]
            metrics = worker.train(make_batch(rows), 0)
            results.append(({k: v for k, v in metrics.items() if k.startswith("train/")}, weights_of(worker)))
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0


def test_nan_in_the_engine_s_log_probs_names_the_sample_also_when_the_gate_is_off(model_folder, tmp_path):
    samples = [{**s, "rollout_log_probs": [-1.0] * len(s["loss_mask"])} for s in make_samples()]
    samples[2]["rollout_log_probs"][0] = float("nan")
    config = make_config(model_folder, parity=dict(OFF), correction={"use_tis": True})
    with (
        open_worker(config, tmp_path) as worker,
        pytest.raises(TrainingError, match=r"rollout_log_probs is nan.*samples 502\n"),
    ):
        worker.train(make_batch(samples), 0)


CI = {"test": True}


def test_ci_checks_pass_on_a_sound_run_and_its_gradient_norms_repeat(model_folder, tmp_path):
    file = tmp_path / "norms" / "grad.jsonl"
    algorithm = {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1}
    for ci in ({**CI, "save_grad_norm": str(file)}, {**CI, "load_grad_norm": str(file)}):
        train(
            model_folder,
            tmp_path,
            make_samples(),
            spread=0.0,
            ci=ci,
            algorithm=dict(algorithm),
            train={"num_steps_per_rollout": 2},
        )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["optimizer_step"] for row in rows] == [0, 1]
    file.write_text("\n".join(json.dumps({**row, "grad_norm": row["grad_norm"] * 1.01}) for row in rows))
    with pytest.raises(TrainingError, match=r"optimizer step 0: the gradient norm is .*\n    fix"):
        train(model_folder, tmp_path, make_samples(), spread=0.0, ci={"load_grad_norm": str(file)})
    file.write_text("no json")
    with pytest.raises(TrainingError, match=r"ci-load-grad-norm .* does not read"):
        train(model_folder, tmp_path, make_samples(), ci={"load_grad_norm": str(file)})


def test_ci_checks_stop_a_run_whose_first_step_is_not_on_policy(model_folder, tmp_path, monkeypatch):
    real = Passes.forward_only
    monkeypatch.setattr(Passes, "forward_only", lambda *a: real(*a) - 0.01)
    with pytest.raises(TrainingError, match="ppo_kl is"):
        train(model_folder, tmp_path, make_samples(), ci={**CI, "logprobs_checker": False})
    train(model_folder, tmp_path, make_samples(), ci={**CI, "kl_checker": False, "logprobs_checker": False})


def test_ci_checks_stop_a_run_whose_engine_disagrees(model_folder, tmp_path):
    with pytest.raises(TrainingError, match="train_rollout_logprob_abs_diff"):
        train(model_folder, tmp_path, make_samples(), spread=0.5, ci=dict(CI))
    train(model_folder, tmp_path, make_samples(), spread=0.5, ci={**CI, "logprobs_checker": False})


def test_the_reference_is_loaded_for_the_divergence_in_the_reward(model_folder, tmp_path):
    other = make_model_folder(tmp_path / "reference", seed=3)
    algorithm = {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True}
    _, weights = train(model_folder, tmp_path, make_samples(), algorithm=dict(algorithm))
    algorithm |= {"kl_coef": 0.5, "kl_loss_type": "k1"}
    found, others = train(model_folder, tmp_path, make_samples(), algorithm=algorithm, model={"ref_load": str(other)})
    assert found["perf/ref_log_probs_time"] > 0
    assert largest_difference(weights, others) > 1e-2


@pytest.fixture(scope="module")
def played(model_folder, tmp_path_factory):
    settings = {
        "optimizer": {"lr": 0.1, "adam_eps": 1.0, "adam_beta1": 0.0, "clip_grad": 0.0},
        "parity": {"enabled": False},
        "algorithm": {"advantage_estimator": "gspo", "use_opsm": True, "use_rollout_logprobs": True},
    }
    cases = [
        {"name": f"{ranks}", "ranks": ranks, "settings": {**settings, "train": {"max_tokens_per_gpu": tokens}}}
        for ranks, tokens in ((1, 8192), (2, 14))
    ]
    cases = [{**case, "story": "splits"} for case in cases]
    custom = {"algorithm": ALGORITHMS["custom loss"], "parity": {"enabled": False}}
    cases += [{"name": f"custom{n}", "ranks": n, "story": "trains", "settings": custom} for n in (1, 2)]
    return play_all(tmp_path_factory.mktemp("ranks"), [{**case, "model": str(model_folder)} for case in cases])


def test_ranks_agree_on_trajectories_that_several_micro_batches_hold(played):
    one, two = (json.loads((played / ranks / "split-rank0.json").read_text()) for ranks in ("1", "2"))
    assert one == pytest.approx(two, rel=2e-5, abs=1e-6)
    assert one["train/grad_norm"] > 1e-3
    with SavedTrainer(played / "1" / "split") as a, SavedTrainer(played / "2" / "split") as b:
        for name in a.shapes:
            assert float((a.whole(name) - b.whole(name)).abs().max()) < 1e-6, name


def test_a_rank_without_work_does_not_call_a_custom_loss_and_knows_its_metrics(played):
    for step in ("idle", "uneven"):
        one, *two = (
            json.loads((played / f"custom{ranks}" / f"{step}-rank{rank}.json").read_text())
            for ranks, rank in ((1, 0), (2, 0), (2, 1))
        )
        assert two[0] == two[1] == pytest.approx(one, rel=2e-5, abs=1e-6)
        assert one["train/mean_ratio"] == pytest.approx(1, abs=1e-4)


def test_nan_from_the_reference_model_names_the_sample(model_folder, tmp_path, monkeypatch):
    real = Passes.forward_only

    def forward(self, model, *given):
        logprobs_R = real(self, model, *given)
        if model is self._roles.reference:
            logprobs_R[0] = float("nan")
        return logprobs_R

    monkeypatch.setattr(Passes, "forward_only", forward)
    with pytest.raises(TrainingError, match=r"the reference model's log-prob is nan.*samples 500\n"):
        train(model_folder, tmp_path, make_samples(), algorithm={"use_kl_loss": True})
