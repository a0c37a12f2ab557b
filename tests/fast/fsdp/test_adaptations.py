import json
import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaPreTrainedModel

from miles.backends.fsdp_utils.adaptations.registry import ADAPTATIONS, PLAIN, adaptation_of
from miles.backends.fsdp_utils.layers import decoder_layers
from miles.backends.fsdp_utils.model import load_policy
from miles.errors import CheckpointError
from miles.utils.expert_weights import places_of_experts
from tests.fast.fsdp.moe import make_moe_folder
from tests.fast.fsdp.support import VOCAB, make_model_folder

WAY_OUT = r"(.|\n)*fix: choose a model of a type with an adaptation \(qwen3, qwen3_moe\), or a plain decoder"


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_an_architecture_without_a_spec_is_taken_as_it_is_stored(llama):
    assert adaptation_of("llama") is PLAIN
    model, _ = load_policy(llama)
    assert [type(layer).__name__ for layer in decoder_layers(model.hf)] == ["LlamaDecoderLayer"] * 2


@pytest.mark.parametrize(("make", "layers"), [(make_model_folder, 2), (make_moe_folder, 3)])
def test_a_spec_finds_the_decoder_layers_of_its_model_in_order(make, layers, tmp_path):
    model, _ = load_policy(make(tmp_path / "model"))
    assert model.hf.config.model_type in ADAPTATIONS
    assert decoder_layers(model.hf) == list(model.hf.base_model.layers)
    assert len(decoder_layers(model.hf)) == layers


def test_the_tensors_of_experts_cover_those_of_the_module_exactly_once():
    wholes = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 6, 5),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(4, 5, 3),
        "model.layers.0.mlp.gate.weight": torch.zeros(4, 5),
    }
    places = places_of_experts({name: tuple(whole.shape) for name, whole in wholes.items()})
    assert len(places) == 4 * 3 + 1
    assert places["model.layers.0.mlp.experts.3.up_proj.weight"].shape == (3, 5)
    for place in places.values():
        part = place.of(wholes[place.source])
        assert part.shape == place.shape
        assert part.is_contiguous()
        part += 1
    assert all(bool((whole == 1).all()) for whole in wholes.values())
    assert sum(math.prod(place.shape) for place in places.values()) == sum(w.numel() for w in wholes.values())


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_that_carry_a_state_across_borders_are_refused_before_weights_are_read(llama, kind):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "layer_types": [kind, "full_attention"]}))
    (llama / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=rf"layers of llama are of kind {kind}, whose state{WAY_OUT}"):
        load_policy(llama)


def test_a_model_whose_layers_are_not_named_is_refused(llama, monkeypatch):
    monkeypatch.setattr(LlamaPreTrainedModel, "_no_split_modules", None)
    found = re.escape("LlamaForCausalLM has 2 layers by its config.json, and 0 of the kind")
    with pytest.raises(CheckpointError, match=rf"{found}(.|\n)*_no_split_modules: none{WAY_OUT}"):
        load_policy(llama)


def test_a_model_with_attention_of_its_own_is_refused(llama, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(CheckpointError, match=rf"LlamaForCausalLM brings attention of its own{WAY_OUT}"):
        load_policy(llama)
