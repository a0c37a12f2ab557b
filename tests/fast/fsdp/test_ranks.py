import json

import pytest
import torch
from safetensors.torch import load_file

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from tests.fast.fsdp.ranks import play_all
from tests.fast.fsdp.support import largest_difference, make_config, open_worker, weights_of

GRADIENT_AS_MOMENT = {"lr": 0.1, "adam_eps": 1.0, "adam_beta1": 0.0, "clip_grad": 0.2}
"""With such a beta AdamW's first moment is the gradient, so a checkpoint holds it."""
SETTINGS = {
    "optimizer": GRADIENT_AS_MOMENT,
    "algorithm": {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "parity": {"enabled": False},
}
SPLITS = [(1, 8192), (1, 14), (2, 8192), (2, 30), (4, 8192), (4, 14)]
"""Ranks and tokens in a micro-batch; the first is what the others are compared with."""
DETERMINISTIC = {**SETTINGS, "run": {"deterministic": True}}


def with_tokens(tokens, settings=SETTINGS):
    return {**settings, "train": {"max_tokens_per_gpu": tokens}}


@pytest.fixture(scope="module")
def played(model_folder, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("ranks")
    cases = [
        {"name": f"{ranks}x{tokens}", "ranks": ranks, "story": "trains", "settings": with_tokens(tokens)}
        for ranks, tokens in SPLITS
    ]
    cases += [
        {"name": "bf16", "ranks": 2, "story": "trains", "settings": {**SETTINGS, "train": {"bf16": True}}},
        {"name": "offloaded", "ranks": 2, "story": "trains", "settings": {**SETTINGS, "train": {"cpu_offload": True}}},
    ]
    cases += [
        {
            "name": f"same{ranks}-{time}",
            "ranks": ranks,
            "threads": 2,
            "story": "trains",
            "settings": with_tokens(30, DETERMINISTIC),
        }
        for ranks in (1, 2)
        for time in (1, 2)
    ]
    cases += [
        {
            "name": f"resumes{ranks}",
            "ranks": ranks,
            "story": "resumes",
            "settings": {
                "optimizer": {"lr_decay_style": "cosine", "lr_warmup_iters": 1},
                "parity": {"enabled": False},
            },
        }
        for ranks in (1, 2)
    ]
    cases += [
        {"name": f"loads{ranks}", "ranks": ranks, "story": "loads", "settings": SETTINGS, "load": str(tmp / "2x30" / "uneven")}
        for ranks in (1, 4)
    ]  # fmt: skip
    return play_all(tmp, [{**case, "model": str(model_folder)} for case in cases])


def tensors_of(folder):
    with SavedTrainer(folder) as saved:
        return {name: saved.whole(name) for name in saved.shapes}


def metrics_of(folder, name):
    found = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-rank*.json"))]
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.parametrize(("ranks", "tokens"), SPLITS[1:])
def test_ranks_and_micro_batches_change_neither_losses_nor_gradients_nor_weights(played, ranks, tokens):
    one, other = played / "1x8192", played / f"{ranks}x{tokens}"
    for step in ("idle", "uneven"):
        expected, found = tensors_of(one / step), tensors_of(other / step)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            error = float((tensor - found[name]).norm() / tensor.norm())
            assert error <= 1e-6, (step, name, error)
        assert metrics_of(other, step) == pytest.approx(metrics_of(one, step), rel=2e-6, abs=1e-6)


def test_what_is_compared_are_gradients_that_move_weights(played, model_folder):
    before = load_file(model_folder / "model.safetensors")
    after = tensors_of(played / "1x8192" / "uneven")
    for name, tensor in before.items():
        assert float((after[f"model.{name}"] - tensor).abs().max()) > 1e-5, name
        assert float(after[f"exp_avg.{name}"].abs().max()) > 1e-4, name


def test_ranks_that_compute_in_bf16_make_the_gradients_of_fp32_but_for_rounding(played):
    exact, rounded = (
        torch.cat(
            [t.flatten() for name, t in tensors_of(played / case / "idle").items() if name.startswith("exp_avg.")]
        )
        for case in ("1x8192", "bf16")
    )
    assert 1e-3 < float((exact - rounded).norm() / exact.norm()) < 0.06


def test_ranks_whose_weights_are_in_the_cpus_memory_train_the_same_bits(played):
    for step in ("idle", "uneven"):
        plain, offloaded = (tensors_of(played / case / step) for case in ("2x8192", "offloaded"))
        assert largest_difference(plain, offloaded) == 0


def files_of(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_deterministic_runs_give_the_same_bits(played, ranks):
    for step in ("idle", "uneven"):
        once, again = (files_of(played / f"same{ranks}-{time}" / step) for time in (1, 2))
        assert len(once) == 1 + 2 * ranks
        assert once == again


# G03, G04: weights, both moments, counters, learning rate and each rank's random state go on where they were.
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_in_the_same_bits(played, ranks):
    folder = played / f"resumes{ranks}"
    whole, again, before = (files_of(folder / name) for name in ("third", "third-again", "second"))
    assert whole == again
    assert whole != before
    assert metrics_of(folder, "whole") == metrics_of(folder, "resumed")
    assert 0 < metrics_of(folder, "resumed")["train/lr"] < 1e-2
    third = tensors_of(folder / "third")
    assert all(float(t.abs().max()) > 0 for name, t in third.items() if name.startswith("exp_avg"))
    assert json.loads(whole["trainer.json"])["state"]["updates"] == 3


def test_each_rank_keeps_a_random_state_of_its_own(played):
    states = [load_file(played / "resumes2" / "second" / f"rng_rank{rank}.safetensors")["torch"] for rank in (0, 1)]
    assert not torch.equal(*states)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_loads_on_fewer_and_on_more(played, ranks):
    saved, again = tensors_of(played / "2x30" / "uneven"), tensors_of(played / f"loads{ranks}" / "again")
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    with SavedTrainer(played / f"loads{ranks}" / "again") as written:
        assert written.world_size == ranks
        assert written.state["updates"] == 2


def test_the_export_of_four_ranks_has_whole_tensors(played, model_folder, tmp_path):
    config = make_config(model_folder, **{k: dict(v) for k, v in SETTINGS.items()})
    with open_worker(config, tmp_path) as worker:
        worker.export_hf(str(played / "4x14" / "uneven"), str(tmp_path / "export"))
        worker.load(str(played / "4x14" / "uneven"))
        assert largest_difference(weights_of(worker), load_file(tmp_path / "export/model.safetensors")) == 0
