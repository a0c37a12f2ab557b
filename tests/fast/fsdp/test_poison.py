"""NaN and infinities wherever they may come from: an error that names sample and column, or a step that is skipped and counted."""

import json

import numpy as np
import pytest
import torch

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from miles.errors import TrainingError
from tests.fast.fsdp.ranks import play_all
from tests.fast.fsdp.support import largest_difference, make_batch, make_config, make_samples, open_worker
from tests.fast.fsdp.test_losses import HOOKS

OFF = {"enabled": False}
NAN, INF = float("nan"), float("inf")
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
PPO = {"advantage_estimator": "ppo"}
UNSCORED = {"use_rollout_logprobs": True}
"""No pass before the first optimizer step, whose check would be the first to see a broken model."""


def samples_with(column, value):
    """Eight samples, of which the third, number 502, holds `value` in `column`."""
    samples = [{**s, "rollout_log_probs": [-1.0] * len(s["loss_mask"])} for s in make_samples()]
    samples[2][column] = value if column == "reward" else [value, *samples[2][column][1:]]
    return samples


def everything(worker):
    """Weights and moments of every role, and the counters, as a checkpoint holds them."""
    tensors = {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t
        for name, t in worker._roles.checkpoint_tensors().items()
    }
    return {name: t.clone() for name, t in tensors.items()}, worker._roles.optimizer.num_updates


def assert_untouched(before, worker):
    after = everything(worker)
    assert largest_difference(before[0], after[0]) == 0
    assert before[1] == after[1]
    assert all(parameter.grad is None for parameter in worker._roles.policy.parameters())


def configured(folder, algorithm=None, correction=None, train=None, **sections):
    return make_config(
        folder,
        algorithm=dict(algorithm or {}),
        correction=dict(correction or {}),
        train={"max_skipped_steps": 5, **(train or {})},
        parity=dict(OFF),
        **sections,
    )


# Columns of the batch


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("column", ["reward", "rollout_log_probs", "loss_mask"])
def test_a_column_of_the_batch_is_named_with_its_sample(model_folder, tmp_path, column, value):
    with open_worker(configured(model_folder, UNSCORED), tmp_path) as worker:
        before = everything(worker)
        with pytest.raises(TrainingError, match=rf"{column} is {value} .*samples 502\n    fix"):
            worker.train(make_batch(samples_with(column, value)), 0)
        assert_untouched(before, worker)


# What models and users' functions make of it


def poison_reference(worker):
    with torch.no_grad():
        next(worker._roles.reference.parameters()).to_local().fill_(NAN)


def poison_policy(worker):
    with torch.no_grad():
        next(worker._roles.policy.parameters()).to_local().fill_(NAN)


def poison_value_head(worker):
    with torch.no_grad():
        worker._roles.critic._model.value_head.to_local().fill_(NAN)


@pytest.mark.parametrize(
    ("algorithm", "poison", "message"),
    [
        (KL, poison_reference, "the reference model's log-prob is nan .*samples 500, 501"),
        ({}, poison_policy, "the trainer's log-prob is nan .*samples 500, 501"),
        (PPO, poison_value_head, "the critic's value is nan .*samples 500, 501"),
        ({"custom_advantage_function_path": f"{HOOKS}.nan_advantages"}, None, "the advantage is nan .*samples 502"),
        ({**PPO, "custom_advantage_function_path": f"{HOOKS}.nan_returns"}, None, "the return is inf .*samples 502"),
    ],
)
def test_what_a_model_or_a_users_function_makes_is_named_with_its_samples(
    model_folder, tmp_path, algorithm, poison, message
):
    with open_worker(configured(model_folder, algorithm), tmp_path) as worker:
        if poison is not None:
            poison(worker)
        before = {name: torch.nan_to_num(t) for name, t in everything(worker)[0].items()}
        with pytest.raises(TrainingError, match=message):
            worker.train(make_batch(make_samples()), 0)
        after = {name: torch.nan_to_num(t) for name, t in everything(worker)[0].items()}
        assert largest_difference(before, after) == 0


def test_a_mask_of_a_users_correction_is_named_with_its_sample(model_folder, tmp_path):
    config = configured(model_folder, correction={"custom_tis_function_path": f"{HOOKS}.nan_masks"})
    with open_worker(config, tmp_path) as worker:
        before = everything(worker)
        batch = make_batch([{**s, "rollout_log_probs": [-1.0] * len(s["loss_mask"])} for s in make_samples()])
        with pytest.raises(TrainingError, match=r"a mask of --custom-tis-function-path is nan .*samples 502\n    fix"):
            worker.train(batch, 0)
        assert_untouched(before, worker)


# Where only the gradient shows it


def huge_logits(worker):
    """A head so large that logits overflow: log-probs of the optimizer step are NaN, and nothing was scored before."""
    with torch.no_grad():
        worker._roles.policy.hf.get_input_embeddings().weight.to_local().fill_(3e38)  # tied to the head


@pytest.mark.parametrize(
    ("sections", "poison"),
    [
        ({"algorithm": UNSCORED}, huge_logits),
        ({"algorithm": {"loss_type": "sft_loss"}}, huge_logits),
        ({"algorithm": {**UNSCORED, "advantage_estimator": "gspo", "use_opsm": True}}, huge_logits),
        ({"correction": {"custom_tis_function_path": f"{HOOKS}.nan_terms"}}, None),
        (
            {"algorithm": {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}.nan_loss"}},
            None,
        ),
        (
            {
                "algorithm": {
                    "loss_type": "custom_loss",
                    "custom_loss_function_path": f"{HOOKS}.nan_beside_the_gradient",
                }
            },
            None,
        ),
    ],
    ids=["logits", "logits, sft", "logits, gspo", "hook", "custom loss", "custom loss beside its gradient"],
)
def test_a_step_whose_loss_or_gradient_is_not_finite_is_skipped_and_counted(model_folder, tmp_path, sections, poison):
    with open_worker(configured(model_folder, **sections), tmp_path) as worker:
        if poison is not None:
            poison(worker)
        before = everything(worker)
        batch = make_batch([{**s, "rollout_log_probs": [-1.0] * len(s["loss_mask"])} for s in make_samples()])
        metrics = worker.train(batch, 0)
        assert metrics["train/skipped_steps"] == metrics["train/optimizer_steps"] == 1
        assert all(np.isfinite(value) for value in metrics.values())
        assert_untouched(before, worker)


def test_rewards_that_overflow_in_the_gradient_skip_the_step(model_folder, tmp_path):
    with open_worker(configured(model_folder), tmp_path) as worker:
        before = everything(worker)
        metrics = worker.train(make_batch([{**s, "reward": 3e38} for s in make_samples()]), 0)
        assert metrics["train/skipped_steps"] == 1
        assert_untouched(before, worker)


def test_a_divergence_that_overflows_skips_the_step(model_folder, tmp_path):
    config = configured(model_folder, {**KL, "kl_loss_type": "k3", "use_rollout_logprobs": True})
    with open_worker(config, tmp_path) as worker:
        with torch.no_grad():  # a policy that is sure of tokens, of which the reference is not
            worker._roles.policy.hf.base_model.norm.weight.to_local().mul_(1e3)
        before = everything(worker)
        batch = make_batch([{**s, "rollout_log_probs": [-1.0] * len(s["loss_mask"])} for s in make_samples()])
        assert worker.train(batch, 0)["train/skipped_steps"] == 1
        assert_untouched(before, worker)


def test_the_critics_step_is_skipped_alone(model_folder, tmp_path):
    algorithm = {**PPO, "custom_advantage_function_path": f"{HOOKS}.huge_returns"}
    with open_worker(configured(model_folder, algorithm), tmp_path) as worker:
        before = everything(worker)[0]
        metrics = worker.train(make_batch(make_samples()), 0)
        after = everything(worker)[0]
    assert metrics["train/critic_skipped_steps"] == 1
    assert metrics["train/skipped_steps"] == 0
    critic, policy = ([n for n in before if n.startswith("critic.") == own] for own in (True, False))
    assert all(torch.equal(before[name], after[name]) for name in critic)
    assert not all(torch.equal(before[name], after[name]) for name in policy)
    assert all(torch.isfinite(after[name]).all() for name in policy)


def test_after_a_skipped_step_the_run_goes_on_as_if_it_had_not_been(model_folder, tmp_path):
    results = []
    for poisoned in (False, True):
        with open_worker(configured(model_folder), tmp_path) as worker:
            if poisoned:
                worker.train(make_batch([{**s, "reward": 3e38} for s in make_samples(seed=1)]), 0)
            worker.train(make_batch(make_samples()), 1)
            results.append(everything(worker))
    assert largest_difference(results[0][0], results[1][0]) == 0
    assert results[0][1] == results[1][1] == 1


def test_all_ranks_skip_the_step_in_which_one_of_them_has_nan(model_folder, tmp_path):
    algorithm = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}.nan_on_the_second_rank"}
    settings = {"algorithm": algorithm, "parity": OFF, "train": {"max_tokens_per_gpu": 30}}
    case = {"name": "poison", "ranks": 2, "story": "trains", "model": str(model_folder), "settings": settings}
    played = play_all(tmp_path, [case]) / "poison"
    for rank in (0, 1):
        assert json.loads((played / f"uneven-rank{rank}.json").read_text())["train/skipped_steps"] == 1
    with SavedTrainer(played / "idle") as before, SavedTrainer(played / "uneven") as after:
        assert all(torch.equal(before.whole(name), after.whole(name)) for name in before.shapes)
        assert all(torch.isfinite(after.whole(name)).all() for name in after.shapes)
