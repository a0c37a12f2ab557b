import errno
import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file

from miles.backends.fsdp_utils import tensor_file
from miles.backends.fsdp_utils.hf_folder import require_same_names
from miles.backends.fsdp_utils.model import load_policy
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


# G03, G04
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


def export(worker, tmp_path):
    worker.save(str(tmp_path / "to-export"))
    worker.export_hf(str(tmp_path / "to-export"), str(tmp_path / "export"))
    return tmp_path / "export"


def test_an_export_is_a_model_folder_with_the_trained_weights(config, model_folder, tmp_path):
    from transformers import Qwen3ForCausalLM

    with open_worker(config, tmp_path) as worker:
        train(worker, [0])
        exported = export(worker, tmp_path)
        trained = weights_of(worker)
        with pytest.raises(CheckpointError, match="exists already"):
            export(worker, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if "partial" in p.name) == []
    model = Qwen3ForCausalLM.from_pretrained(exported)
    assert largest_difference(trained, {n: p.detach() for n, p in model.named_parameters()}) == 0
    with open_worker(make_config(exported), tmp_path) as worker:
        assert largest_difference(trained, weights_of(worker)) == 0


# G10: the tiny model has fewer key-value heads than heads.
def test_an_export_has_every_other_file_of_the_folder_byte_by_byte(model_folder, tmp_path):
    from transformers import AutoConfig

    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"add_bos_token":  true}')
    (folder / "added_tokens.json").write_text('{"<new>": 23}')
    (folder / "chat_template.jinja").write_bytes("{{ messages }} é\r\n".encode())
    with open_worker(make_config(folder), tmp_path) as worker:
        exported = export(worker, tmp_path)
    others = {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix != ".safetensors"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} < others.keys()
    assert {f.name: f.read_bytes() for f in exported.iterdir() if f.suffix != ".safetensors"} == others
    assert AutoConfig.from_pretrained(exported).num_key_value_heads == 1


# G09
def test_the_head_of_an_exported_tied_model_is_its_trained_embedding(config, tmp_path):
    from transformers import AutoModelForCausalLM

    with open_worker(config, tmp_path) as worker:
        train(worker, [0])
        exported = export(worker, tmp_path)
        embedding = weights_of(worker)["model.embed_tokens.weight"]
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.config.tie_word_embeddings
    assert torch.equal(model.get_output_embeddings().weight, embedding)
    assert "lm_head.weight" not in load_file(exported / "model.safetensors")


# G13
@pytest.mark.parametrize(
    ("exported", "told"),
    [
        ({"experts.0", "experts.1"}, "2 missing: experts.2, experts.3"),
        ({"experts.0", "experts.1", "experts.2", "experts.3", "experts.4"}, "1 unexpected: experts.4"),
    ],
)
def test_an_export_that_lacks_or_adds_a_tensor_is_refused(exported, told):
    source = {f"experts.{number}" for number in range(4)}
    require_same_names(source, source)
    with pytest.raises(CheckpointError, match=told):
        require_same_names(exported, source)


def test_an_export_of_another_model_is_refused(config, checkpoint, tmp_path):
    other = make_model_folder(tmp_path / "other", tied=False)
    with (
        open_worker(make_config(other), tmp_path) as worker,
        pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight"),
    ):
        worker.export_hf(str(checkpoint), str(tmp_path / "export"))
    assert not (tmp_path / "export").exists()


# G07
@pytest.mark.parametrize("file", ["shards", "rng", "trainer.json", "export"])
def test_a_full_disk_is_told_with_path_and_free_space_and_the_save_before_still_loads(
    config, checkpoint, tmp_path, monkeypatch, file
):
    sync = tensor_file.os.fsync
    left = {"shards": 0, "rng": 1, "trainer.json": 2, "export": 3}[file]

    def full(fd):
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= 1
        sync(fd)

    with open_worker(config, tmp_path) as worker:
        worker.load(str(checkpoint))
        monkeypatch.setattr(tensor_file.os, "fsync", full)
        with pytest.raises(CheckpointError, match="cannot be written") as error:
            export(worker, tmp_path)
        monkeypatch.undo()
        assert "No space left on device" in str(error.value)
        assert "MiB free" in str(error.value)
        assert list(tmp_path.rglob("*.partial")) == []
        worker.load(str(checkpoint))


def files_of(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_copy_is_written_as_it_was_while_training_goes_on(config, tmp_path):
    with open_worker(config, tmp_path) as worker:
        train(worker, [0])
        worker.save(str(tmp_path / "at-once"))
        worker.copy_state()
        train(worker, [1])
        writer = threading.Thread(target=worker.write_copy, args=[str(tmp_path / "copy")])
        writer.start()
        train(worker, [2])
        writer.join()
        worker.save(str(tmp_path / "later"))
    assert files_of(tmp_path / "copy") == files_of(tmp_path / "at-once")
    assert files_of(tmp_path / "later").keys() == files_of(tmp_path / "copy").keys()
    assert files_of(tmp_path / "later") != files_of(tmp_path / "copy")


@pytest.mark.parametrize(
    ("key", "flag"),
    [("ranks", "--train-ranks 7"), ("threads", "--torch-threads 7"), ("cpu_offload", "--fsdp-cpu-offload true")],
)
def test_a_deterministic_run_does_not_resume_where_sums_would_be_rounded_otherwise(
    checkpoint, model_folder, tmp_path, key, flag
):
    edit(checkpoint, lambda record: record["state"].update({key: 7}))
    with (
        open_worker(make_config(model_folder, run={"deterministic": True}), tmp_path) as worker,
        pytest.raises(CheckpointError, match=f"saved with {flag}, and this run has (1|false).*\n    fix: {flag}"),
    ):
        worker.load(str(checkpoint))
    with open_worker(make_config(model_folder), tmp_path) as worker:
        worker.load(str(checkpoint))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_under_the_names_and_in_the_dtype_of_the_folder(tmp_path, tied):
    folder = make_model_folder(tmp_path / "model", tied=tied, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    with open_worker(make_config(folder), tmp_path) as worker:
        weights = dict(worker.hf_weights())
        assert worker.expected_weights() == {name: t.nbytes for name, t in weights.items()}
        exported = load_file(export(worker, tmp_path) / "model.safetensors")
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


# G09: a folder that says tied, and stores a head of its own.
def test_a_tied_folder_whose_stored_head_differs_is_refused(model_folder, tmp_path):
    from safetensors.torch import save_file

    folder = shutil.copytree(model_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings, but lm_head.weight and .* differ"):
        load_policy(folder)
