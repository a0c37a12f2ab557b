import json

import pytest

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from miles.errors import TrainingError
from tests.fast.fsdp.ranks import play_all
from tests.fast.fsdp.support import make_batch, make_config, make_samples, open_worker

GRADIENT_AS_MOMENT = {"lr": 0.1, "adam_eps": 1.0, "adam_beta1": 0.0, "clip_grad": 0.2}
BALANCES = ("balance_data", "balance_by_flops")


@pytest.fixture(scope="module")
def played(model_folder, tmp_path_factory):
    cases = [{"name": "one", "ranks": 1, "train": {}}]
    cases += [{"name": name, "ranks": 2, "train": {name: True, "max_tokens_per_gpu": 30}} for name in BALANCES]
    return play_all(
        tmp_path_factory.mktemp("balance"),
        [
            {
                "name": case["name"],
                "ranks": case["ranks"],
                "story": "trains",
                "model": str(model_folder),
                "settings": {
                    "optimizer": GRADIENT_AS_MOMENT,
                    "parity": {"enabled": False},
                    "train": case["train"],
                },
            }
            for case in cases
        ],
    )


# Case B43: in the step `idle` one of two ranks has no sample, and takes part all the same.
@pytest.mark.parametrize("balance", BALANCES)
def test_balancing_changes_neither_gradients_nor_weights(played, balance):
    for step in ("idle", "uneven"):
        with SavedTrainer(played / "one" / step) as one, SavedTrainer(played / balance / step) as other:
            for name in one.shapes:
                expected, found = one.whole(name), other.whole(name)
                assert float((expected - found).norm()) <= 1e-6 * float(expected.norm()), (step, name)
        expected, found = (json.loads((played / case / f"{step}-rank0.json").read_text()) for case in ("one", balance))
        assert found == pytest.approx(expected, rel=2e-6, abs=1e-6)


def steps_of(model_folder, tmp_path, samples, **train):
    config = make_config(model_folder, train=train, parity={"enabled": False})
    with open_worker(config, tmp_path) as worker:
        return worker.train(make_batch(make_samples(samples)), 0)["train/optimizer_steps"]


def test_what_is_left_over_is_trained_only_when_that_is_allowed(model_folder, tmp_path):
    assert steps_of(model_folder, tmp_path, 5, global_batch_size=2, allow_partial_train_step=True) == 3
    with pytest.raises(TrainingError, match="5 trajectories, which --global-batch-size 2 does not divide"):
        steps_of(model_folder, tmp_path, 5, global_batch_size=2)


def test_steps_of_a_dynamic_size_take_any_number_of_samples(model_folder, tmp_path):
    dynamic = {"num_steps_per_rollout": 2, "use_dynamic_global_batch_size": True}
    assert steps_of(model_folder, tmp_path, 5, **dynamic) == 2
    assert steps_of(model_folder, tmp_path, 1, **dynamic) == 1


# Case B42.
def test_a_sample_larger_than_a_micro_batch_is_named(model_folder, tmp_path):
    longest = max(len(s["tokens"]) for s in make_samples(5))
    assert steps_of(model_folder, tmp_path, 5, max_tokens_per_gpu=longest) == 1
    with pytest.raises(
        TrainingError, match=rf"has {longest} tokens, more than a micro-batch may hold \({longest - 1}\)"
    ):
        steps_of(model_folder, tmp_path, 5, max_tokens_per_gpu=longest - 1)
