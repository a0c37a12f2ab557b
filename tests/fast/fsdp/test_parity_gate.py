import pytest
import torch

from miles.errors import ParityError
from tests.fast.fsdp.support import (
    make_batch,
    make_config,
    make_model_folder,
    make_samples,
    open_worker,
    scored_batch,
    with_log_probs,
)


@pytest.fixture
def worker(model_folder, tmp_path):
    with open_worker(make_config(model_folder, rollout={"temperature": 0.9}), tmp_path) as opened:
        yield opened


def test_log_probs_of_the_same_weights_pass_and_the_difference_is_reported(worker):
    metrics = worker.train(scored_batch(worker, make_samples(), 0.9), 0)
    assert metrics["train/rollout_logprob_abs_diff_mean"] < 1e-6
    assert metrics["train/rollout_logprob_abs_diff_p99"] < 1e-5


def test_a_wrong_temperature_stops_training_before_the_first_step(worker):
    with pytest.raises(ParityError, match=r"cause: temperature: .*fit temperature 0.6 .*divides by 0.9") as error:
        worker.train(scored_batch(worker, make_samples(), 0.6), 4)
    assert "samples of rollout step 4" in str(error.value)
    assert "bounds are mean 0.001, p99 0.01" in str(error.value)
    metrics = worker.train(scored_batch(worker, make_samples(), 0.9), 4)
    assert metrics["train/optimizer_steps"] == 1


@pytest.mark.parametrize("shift", [1, -1])
def test_log_probs_off_by_one_token_stop_training(worker, shift):
    samples = [{**s, "loss_mask": [1.0] * len(s["loss_mask"])} for s in make_samples()]
    scores = worker.score([s["tokens"] for s in samples], 0.9)
    shifted = [[*row[1:], -3.0] if shift == 1 else [-3.0, *row[:-1]] for row in scores]
    with pytest.raises(ParityError, match=rf"cause: tokens: .*trainer's of token t\{shift:+d}"):
        worker.train(make_batch(with_log_probs(samples, shifted)), 0)


def test_log_probs_of_stale_weights_stop_training(worker):
    stale = scored_batch(worker, make_samples(), 0.9)
    worker.train(stale, 0)
    with pytest.raises(ParityError, match=r"(?s)cause: weights: .*fix: the engine does not hold") as error:
        worker.train(stale, 1)
    assert "worst in sample 50" in str(error.value)


def test_log_probs_of_another_model_stop_training(worker, tmp_path):
    from transformers import Qwen3ForCausalLM

    other = Qwen3ForCausalLM.from_pretrained(make_model_folder(tmp_path / "other", seed=9))
    samples = make_samples()
    with torch.no_grad():
        scores = [
            torch.log_softmax(other(torch.tensor([s["tokens"]])).logits[0, :-1] / 0.9, -1)
            .gather(1, torch.tensor(s["tokens"][1:])[:, None])[:, 0]
            .tolist()
            for s in samples
        ]
    with pytest.raises(ParityError, match="cause: weights"):
        worker.train(make_batch(with_log_probs(samples, scores)), 0)


def test_tokens_of_mixed_weight_versions_are_named(worker):
    samples = make_samples()
    scores = worker.score([s["tokens"] for s in samples], 0.9)
    scores = [[x + 0.05 * (-1) ** i for i, x in enumerate(row)] for row in scores]
    mixed = [{**s, "weight_version": 3 + (n % 2)} for n, s in enumerate(with_log_probs(samples, scores))]
    with pytest.raises(ParityError, match="cause: weights: the tokens were sampled by weight versions 3, 4"):
        worker.train(make_batch(mixed), 0)


def test_bf16_rounding_is_named_dtype(worker):
    samples = make_samples()
    scores = worker.score([s["tokens"] for s in samples], 0.9)
    scores = [[float(torch.tensor(x).bfloat16()) for x in row] for row in scores]
    with pytest.raises(ParityError, match=r"cause: dtype: .*bf16 rounding"):
        worker.train(make_batch(with_log_probs(samples, scores)), 0)


def test_masked_tokens_are_not_compared(worker):
    samples = with_log_probs(make_samples(), worker.score([s["tokens"] for s in make_samples()], 0.9))
    for sample in samples:
        sample["loss_mask"] = [0.0, *sample["loss_mask"][1:]]
        sample["rollout_log_probs"] = [0.0, *sample["rollout_log_probs"][1:]]
    assert worker.train(make_batch(samples), 0)["train/rollout_logprob_abs_diff_max"] < 1e-4
