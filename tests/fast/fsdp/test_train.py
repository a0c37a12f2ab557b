import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from miles.errors import TrainingError
from tests.fast.fsdp.support import (
    VOCAB,
    largest_difference,
    make_batch,
    make_config,
    make_samples,
    open_worker,
    scored_batch,
    weights_of,
)


def hf_log_probs(model, tokens, temperature):
    logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_scores_equal_a_full_forward_of_each_sequence_alone(model_folder, tmp_path):
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, n).tolist() for n in (9, 2, 1, 17)]
    with open_worker(make_config(model_folder, train={"max_tokens_per_gpu": 20}), tmp_path) as worker, torch.no_grad():
        for temperature in (1.0, 0.6):
            scores = worker.score(sequences, temperature)
            assert [len(s) for s in scores] == [8, 1, 0, 16]
            for tokens, ours in zip(sequences, scores, strict=True):
                if len(tokens) > 1:
                    theirs = hf_log_probs(model, tokens, temperature)
                    torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
def test_two_optimizer_steps_equal_a_plain_training_loop(model_folder, tmp_path, per_token):
    samples = make_samples(8)
    config = make_config(
        model_folder,
        train={"global_batch_size": 4, "max_tokens_per_gpu": 24},
        rollout={"temperature": 0.8},
        algorithm={
            "calculate_per_token_loss": per_token,
            "eps_clip": 0.02,
            "eps_clip_high": 0.03,
            "entropy_coef": 0.01,
        },
        optimizer={"lr": 1.0, "adam_eps": 1.0, "weight_decay": 0.1, "clip_grad": 0.5, "lr_decay_style": "linear"},
    )
    with open_worker(config, tmp_path, total_steps=10) as worker:
        metrics = worker.train(scored_batch(worker, samples, 0.8), 0)
        ours = weights_of(worker)

    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1.0,
    )
    with torch.no_grad():
        olds = [hf_log_probs(model, s["tokens"], 0.8) for s in samples]
    norms = []
    for number, part in enumerate((range(4), range(4, 8))):
        optimizer.zero_grad()
        total = sum(sum(samples[b]["loss_mask"]) for b in part)
        loss = torch.zeros(())
        for b in part:
            mask = torch.tensor(samples[b]["loss_mask"])
            logits = model(torch.tensor([samples[b]["tokens"]])).logits[0, :-1] / 0.8
            log_p = torch.log_softmax(logits, -1)[-len(mask) :]
            lp = log_p.gather(1, torch.tensor(samples[b]["tokens"][-len(mask) :])[:, None])[:, 0]
            ratio = (lp - olds[b][-len(mask) :]).exp()
            a = samples[b]["reward"]
            term = torch.maximum(-ratio * a, -ratio.clamp(0.98, 1.03) * a) + 0.01 * (log_p.exp() * log_p).sum(-1)
            loss = loss + (term * mask).sum() / (total if per_token else mask.sum() * 4)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 1 - number / 10
        optimizer.step()

    theirs = {n: p.detach() for n, p in model.named_parameters()}
    assert largest_difference(ours, theirs) < 2e-6
    assert metrics["train/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics["train/lr"] == pytest.approx(0.9)
    assert metrics["train/pg_clipfrac"] > 0


def train_once(model_folder, tmp_path, samples, **sections):
    with open_worker(make_config(model_folder, **sections), tmp_path) as worker:
        metrics = worker.train(scored_batch(worker, samples), 0)
        return metrics, weights_of(worker)


GRADIENT_AS_UPDATE = {"lr": 1.0, "adam_eps": 1.0, "clip_grad": 0.0}
"""With such an epsilon AdamW moves weights by about their gradient, so comparing weights compares gradients."""


def test_micro_batches_order_and_gradient_checkpointing_change_nothing(model_folder, tmp_path):
    samples = make_samples(6)
    metrics, whole = train_once(model_folder, tmp_path, samples, optimizer=dict(GRADIENT_AS_UPDATE))
    for variant in (
        {"train": {"max_tokens_per_gpu": 16}},
        {"model": {"gradient_checkpointing": True}},
    ):
        other, split = train_once(model_folder, tmp_path, samples, optimizer=dict(GRADIENT_AS_UPDATE), **variant)
        assert largest_difference(whole, split) <= 1e-6
        assert other["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-6)
        assert other["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-5)
    _, shuffled = train_once(model_folder, tmp_path, samples[::-1], optimizer=dict(GRADIENT_AS_UPDATE))
    assert largest_difference(whole, shuffled) <= 1e-6


def test_a_masked_sample_adds_nothing(model_folder, tmp_path):
    samples = make_samples(4)
    masked = {**samples[0], "loss_mask": [0.0] * len(samples[0]["loss_mask"]), "trajectory": 99}
    metrics, without = train_once(model_folder, tmp_path, samples)
    _, having = train_once(model_folder, tmp_path, [*samples, masked])
    assert metrics["train/grad_norm"] > 0
    assert largest_difference(without, having) == 0


def test_equal_rewards_leave_the_weights_as_they_are(model_folder, tmp_path):
    with open_worker(make_config(model_folder), tmp_path) as worker:
        before = weights_of(worker)
        metrics = worker.train(scored_batch(worker, [{**s, "reward": 0.0} for s in make_samples()]), 0)
        assert metrics["train/loss"] == 0
        assert metrics["train/grad_norm"] == 0
        assert largest_difference(before, weights_of(worker)) == 0


def test_a_step_without_trainable_token_is_reported_and_moves_nothing(model_folder, tmp_path):
    samples = [{**s, "loss_mask": [0.0] * len(s["loss_mask"])} for s in make_samples(4)]
    with open_worker(make_config(model_folder, optimizer={"weight_decay": 0.1}), tmp_path) as worker:
        before = weights_of(worker)
        metrics = worker.train(scored_batch(worker, samples), 0)
        assert metrics["train/empty_steps"] == 1
        assert metrics["train/trainable_tokens"] == 0
        assert metrics["train/loss"] == 0
        assert all(np.isfinite(v) for v in metrics.values())
        assert largest_difference(before, weights_of(worker)) == 0


# Case H06: 3, 1 and 4 optimizer steps, with a resume between.
def test_the_step_counter_rises_strictly_with_uneven_batches_and_over_a_resume(model_folder, tmp_path):
    config = make_config(model_folder, train={"global_batch_size": 2})
    with open_worker(config, tmp_path) as worker:
        seen = [
            worker.train(scored_batch(worker, make_samples(n)), i)["train/optimizer_steps"]
            for i, n in enumerate((6, 2))
        ]
        worker.save(str(tmp_path / "checkpoint"))
    with open_worker(config, tmp_path) as worker:
        worker.load(str(tmp_path / "checkpoint"))
        seen.append(worker.train(scored_batch(worker, make_samples(8)), 2)["train/optimizer_steps"])
    assert seen == [3, 4, 8]


def test_supervised_loss_falls_and_needs_neither_reward_nor_log_probs(model_folder, tmp_path):
    samples = [{k: s[k] for k in ("tokens", "loss_mask", "sample_index")} for s in make_samples()]
    config = make_config(
        model_folder, algorithm={"loss_type": "sft_loss"}, rollout={"temperature": 0.5}, train={"global_batch_size": 4}
    )
    with open_worker(config, tmp_path) as worker:
        expected = [worker.score([s["tokens"]], 1.0)[0][-len(s["loss_mask"]) :] for s in samples[:4]]
        expected = np.mean(
            [-np.dot(row, s["loss_mask"]) / sum(s["loss_mask"]) for row, s in zip(expected, samples[:4], strict=True)]
        )
        first = worker.train(make_batch(samples[:4]), 0)
        assert first["train/loss"] == pytest.approx(expected, abs=1e-5)
        losses = [worker.train(make_batch(samples), i)["train/loss"] for i in range(1, 6)]
    assert losses[-1] < losses[0] < first["train/loss"]
    assert not [name for name in first if "logprob" in name]


def test_kl_to_the_reference_starts_at_zero_and_holds_the_policy_back(model_folder, tmp_path):
    moved = {}
    for coefficient in (0.0, 5.0):
        algorithm = {"use_kl_loss": True, "kl_loss_coef": coefficient, "kl_loss_type": "k3"}
        with open_worker(make_config(model_folder, algorithm=algorithm), tmp_path) as worker:
            first = worker.train(scored_batch(worker, make_samples()), 0)
            assert first["train/kl_loss"] == pytest.approx(0, abs=1e-6)
            for step in range(1, 6):
                last = worker.train(scored_batch(worker, make_samples()), step)
        moved[coefficient] = last["train/kl_loss"]
    assert 0 < moved[5.0] < moved[0.0] / 2


@pytest.mark.parametrize(("column", "value"), [("reward", float("nan")), ("rollout_log_probs", float("inf"))])
def test_a_batch_with_nan_is_refused_and_names_the_samples(model_folder, tmp_path, column, value):
    with open_worker(make_config(model_folder), tmp_path) as worker:
        before = weights_of(worker)
        samples = [{**s, "rollout_log_probs": [-1.0] * len(s["loss_mask"])} for s in make_samples()]
        samples[3][column] = value if column == "reward" else [value, *samples[3][column][1:]]
        with pytest.raises(TrainingError, match=rf"{column} is {value}.*samples 503\n"):
            worker.train(make_batch(samples), 0)
        assert largest_difference(before, weights_of(worker)) == 0


def test_a_batch_without_log_probs_cannot_pass_the_gate_unless_it_is_off(model_folder, tmp_path):
    with (
        open_worker(make_config(model_folder), tmp_path) as worker,
        pytest.raises(TrainingError, match="lacks the columns rollout_log_probs"),
    ):
        worker.train(make_batch(make_samples()), 0)
    with open_worker(make_config(model_folder, parity={"enabled": False}), tmp_path) as worker:
        assert "train/loss" in worker.train(make_batch(make_samples()), 0)


def test_steps_whose_gradient_is_not_finite_are_skipped_counted_and_bounded(model_folder, tmp_path):
    config = make_config(
        model_folder, train={"max_skipped_steps": 2, "num_steps_per_rollout": 2}, parity={"enabled": False}
    )
    samples = make_samples(4)
    with open_worker(config, tmp_path) as worker:
        before = weights_of(worker)
        huge = make_batch([{**s, "reward": 3e38} for s in samples])
        metrics = worker.train(huge, 0)
        assert metrics["train/skipped_steps"] == 2
        assert metrics["train/optimizer_steps"] == 2
        assert largest_difference(before, weights_of(worker)) == 0
        assert worker.train(make_batch(samples), 1)["train/skipped_steps"] == 0
        assert worker.train(huge, 2)["train/skipped_steps"] == 2
        with pytest.raises(TrainingError, match=r"3 optimizer steps in a row.*max_skipped_steps allows 2\n    fix"):
            worker.train(huge, 3)
