import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fast.fsdp.support import (
    largest_difference,
    make_config,
    make_samples,
    open_worker,
    scored_batch,
    weights_of,
)

SETTINGS = {
    "train": {"global_batch_size": 3, "max_tokens_per_gpu": 24},
    "optimizer": {"lr": 0.1, "adam_eps": 1.0, "clip_grad": 0.2},
    "algorithm": {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1},
}


def samples_with_an_idle_rank() -> list[dict]:
    """Three steps of three trajectories; the first has one trainable trajectory, so one rank has nothing to do in it."""
    samples = make_samples(9)
    for sample in samples[:2]:
        sample["loss_mask"] = [0.0] * len(sample["loss_mask"])
    return samples


def run_rank(rank: int, folder: str, tmp: str) -> None:
    from safetensors.torch import save_file

    from miles.backends.fsdp_utils.worker import FsdpTrainWorker

    config = make_config(Path(folder), **{k: dict(v) for k, v in SETTINGS.items()})
    worker = FsdpTrainWorker(
        config, rank=rank, world_size=2, init_method=f"file://{tmp}/store", total_optimizer_steps=100, threads=1
    )
    metrics = worker.train(scored_batch(worker, samples_with_an_idle_rank()), 0)
    worker.save(f"{tmp}/checkpoint")
    worker.export_hf(f"{tmp}/export")
    weights = weights_of(worker)
    if rank == 1:
        numbers = {k: torch.tensor(v, dtype=torch.float64) for k, v in metrics.items() if k.startswith("train/")}
        save_file(weights, f"{tmp}/weights.safetensors")
        save_file(numbers, f"{tmp}/metrics.safetensors")
    worker.close()
    # A gloo thread may still free a tensor, for which it needs the interpreter, while that is being taken down: torch then
    # aborts ("terminate called without an active exception", one exit in twelve on a busy machine). All is written here.
    os._exit(0)


@pytest.fixture(scope="module")
def two_ranks(model_folder, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("two_ranks")
    code = "import sys; from tests.fast.fsdp.test_two_ranks import run_rank; run_rank(int(sys.argv[1]), *sys.argv[2:])"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(model_folder), str(tmp)],
            cwd=Path(__file__).parents[3],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return tmp


@pytest.fixture(scope="module")
def one_rank(model_folder, tmp_path_factory):
    with open_worker(
        make_config(model_folder, **{k: dict(v) for k, v in SETTINGS.items()}), tmp_path_factory.mktemp("one_rank")
    ) as worker:
        metrics = worker.train(scored_batch(worker, samples_with_an_idle_rank()), 0)
        return metrics, weights_of(worker)


def test_two_ranks_make_the_weights_of_one(two_ranks, one_rank, model_folder):
    metrics, weights = one_rank
    assert largest_difference(weights, load_file(two_ranks / "weights.safetensors")) <= 1e-6
    assert largest_difference(weights, load_file(model_folder / "model.safetensors")) > 1e-3
    others = {k: float(v) for k, v in load_file(two_ranks / "metrics.safetensors").items()}
    assert others == pytest.approx({k: v for k, v in metrics.items() if k in others}, abs=1e-5)


def test_the_export_of_two_ranks_has_whole_tensors(two_ranks):
    exported = load_file(two_ranks / "export/model.safetensors")
    assert largest_difference(exported, load_file(two_ranks / "weights.safetensors")) == 0


def test_a_checkpoint_of_two_ranks_resumes_on_one(two_ranks, model_folder, tmp_path):
    weights = load_file(two_ranks / "weights.safetensors")
    config = make_config(model_folder, **{k: dict(v) for k, v in SETTINGS.items()})
    with open_worker(config, tmp_path) as worker:
        worker.load(str(two_ranks / "checkpoint"))
        assert largest_difference(weights, weights_of(worker)) == 0
        assert worker.train(scored_batch(worker, samples_with_an_idle_rank()), 1)["train/optimizer_steps"] == 6
