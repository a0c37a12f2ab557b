import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, CohereForCausalLM

from miles.backends.fsdp_utils.model import load_policy
from miles.backends.training_utils.packing import FlatBatch
from miles.errors import CheckpointError


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


def test_a_missing_folder_config_or_weights_are_named(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: no such model folder\n    fix"):
        load_policy(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        load_policy(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_policy(folder)


def test_an_unreadable_config_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(CheckpointError, match=r"config.json does not load: .*no-such-model"):
        load_policy(folder)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "unexpected: model.extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), "model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "stored as I8"),
    ],
)
def test_weights_that_do_not_belong_to_the_config_are_refused(folder, change, named):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=named):
        load_policy(folder)


def test_a_broken_file_and_a_missing_shard_are_refused(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_policy(folder)
    index = {"weight_map": {"model.norm.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names missing files: model-2.safetensors"):
        load_policy(folder)


def test_a_model_whose_logits_are_not_a_plain_projection_is_refused(tmp_path):
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logit_scale=0.25,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path / "cohere")
    with pytest.raises(
        CheckpointError, match=r"CohereForCausalLM on packed sequences are not a softmax over its output"
    ):
        load_policy(tmp_path / "cohere")


def test_loading_turns_dropout_off(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model, _ = load_policy(folder)
    assert model.training
    part = FlatBatch.from_sequences([list(range(8))]).micro_batch(np.arange(1))
    once, again = (model(part, 1.0)[0] for _ in range(2))
    assert torch.equal(once, again)
