import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from miles.errors import CheckpointError
from tests.fast.fsdp.support import (
    largest_difference,
    make_config,
    make_model_folder,
    make_samples,
    open_worker,
    scored_batch,
    weights_of,
)


def train(worker, steps):
    for step in steps:
        metrics = worker.train(scored_batch(worker, make_samples(seed=step)), step)
    return metrics


@pytest.fixture
def config(model_folder):
    return make_config(
        model_folder,
        train={"global_batch_size": 4},
        optimizer={"lr": 1e-2, "lr_decay_style": "cosine", "lr_warmup_iters": 3, "weight_decay": 0.1},
    )


@pytest.fixture
def checkpoint(config, tmp_path):
    with open_worker(config, tmp_path) as worker:
        train(worker, [0, 1])
        worker.save(str(tmp_path / "checkpoint"))
    return tmp_path / "checkpoint"


def test_a_resumed_run_ends_in_the_same_bits(config, checkpoint, tmp_path):
    with open_worker(config, tmp_path) as worker:
        whole = train(worker, [0, 1, 2])
        expected, random = weights_of(worker), torch.get_rng_state()
    with open_worker(config, tmp_path) as worker:
        torch.manual_seed(99)
        worker.load(str(checkpoint))
        assert torch.equal(torch.get_rng_state(), random)
        resumed = train(worker, [2])
        assert largest_difference(expected, weights_of(worker)) == 0
    numbers = [{k: v for k, v in m.items() if k.startswith("train/")} for m in (whole, resumed)]
    assert numbers[0] == numbers[1]


def test_a_checkpoint_holds_no_pickle(checkpoint):
    files = [f for f in checkpoint.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} == {".json", ".safetensors"}


def test_a_folder_without_finished_checkpoint_is_refused(config, checkpoint, tmp_path):
    (checkpoint / "trainer.json").unlink()
    with open_worker(config, tmp_path) as worker:
        for folder in (checkpoint, tmp_path / "nowhere"):
            with pytest.raises(CheckpointError, match=r"no complete trainer checkpoint.*\n    fix"):
                worker.load(str(folder))


def edit(checkpoint, change):
    file = checkpoint / "trainer.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(version=99), r"format and version are \('miles-fsdp-trainer', 99\)"),
        (lambda r: r["tensors"].pop("model.model.norm.weight"), "1 missing, first model.model.norm.weight"),
        (lambda r: r["tensors"].update({"model.x": [1]}), "1 unexpected, first model.x"),
        (
            lambda r: r["tensors"].update({"model.model.norm.weight": [7]}),
            r"of another shape.*\(7,\) instead of \(32,\)",
        ),
        (lambda r: r["state"].pop("optimizer_steps"), "lacks 'optimizer_steps'"),
        (lambda r: r.pop("tensors"), "no 'tensors'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(config, checkpoint, tmp_path, change, message):
    edit(checkpoint, change)
    with open_worker(config, tmp_path) as worker, pytest.raises(CheckpointError, match=message):
        worker.load(str(checkpoint))


def test_damaged_or_missing_files_are_refused(config, checkpoint, tmp_path):
    with open_worker(config, tmp_path) as worker:
        (shards,) = (checkpoint / "shards").glob("*.safetensors")
        content = shards.read_bytes()
        shards.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match=r"the shards do not load"):
            worker.load(str(checkpoint))
        shards.unlink()
        with pytest.raises(CheckpointError, match=r"the shards do not load"):
            worker.load(str(checkpoint))
        shards.write_bytes(content)
        (checkpoint / "rng_rank0.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"rng_rank0.safetensors: missing"):
            worker.load(str(checkpoint))
        (checkpoint / "trainer.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"trainer.json: not JSON"):
            worker.load(str(checkpoint))


def test_an_export_is_a_model_folder_with_the_trained_weights(config, model_folder, tmp_path):
    from transformers import Qwen3ForCausalLM

    with open_worker(config, tmp_path) as worker:
        train(worker, [0])
        worker.export_hf(str(tmp_path / "export"))
        trained = weights_of(worker)
        with pytest.raises(CheckpointError, match="exists already"):
            worker.export_hf(str(tmp_path / "export"))
    assert (tmp_path / "export/config.json").read_bytes() == (model_folder / "config.json").read_bytes()
    assert (tmp_path / "export/tokenizer.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir() if "partial" in p.name) == []
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "export")
    assert largest_difference(trained, {n: p.detach() for n, p in model.named_parameters()}) == 0
    with open_worker(make_config(tmp_path / "export"), tmp_path) as worker:
        assert largest_difference(trained, weights_of(worker)) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_under_the_names_and_in_the_dtype_of_the_folder(tmp_path, tied):
    folder = make_model_folder(tmp_path / "model", tied=tied, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    with open_worker(make_config(folder), tmp_path) as worker:
        weights = dict(worker.hf_weights())
        assert worker.expected_weights() == {name: t.nbytes for name, t in weights.items()}
        worker.export_hf(str(tmp_path / "export"))
    exported = load_file(tmp_path / "export/model.safetensors")
    assert ("lm_head.weight" in weights) is not tied
    assert weights.keys() == stored.keys() == exported.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(weights[name], tensor)
        assert torch.equal(exported[name], tensor)


def test_a_folder_that_also_stores_the_tied_head_expects_it_once(model_folder, tmp_path):
    from safetensors.torch import save_file

    folder = shutil.copytree(model_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with open_worker(make_config(folder), tmp_path) as worker:
        assert "lm_head.weight" not in worker.expected_weights()
        assert worker.expected_weights() == {name: t.nbytes for name, t in worker.hf_weights()}
