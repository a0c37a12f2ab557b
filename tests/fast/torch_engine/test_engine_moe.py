import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from miles.backends.torch_engine.request import RequestRefused
from miles.backends.weight_sync.checksum import checksum_tensor
from tests.fast.torch_engine.support import (
    EOS,
    LETTERS,
    PAD,
    assert_matches_reference,
    make_tokenizer,
    request,
    running_engine,
)

KINDS: dict[str, dict[str, Any]] = {
    "all layers of experts": {},
    "one layer without, weights not renormalised": {"mlp_only_layers": [0], "norm_topk_prob": False},
}
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def make_moe(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(7)
    values: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "vocab_size": len(LETTERS),
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**(values | changes))).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp("moe"))


def some_prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, len(LETTERS)) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_ragged_batches_equal_a_full_forward(kind: str, tmp_path: Path) -> None:
    with running_engine(make_moe(tmp_path, **KINDS[kind])) as engine:
        rng = random.Random(1)
        prompts = [prompt for prompt in some_prompts(4) for _ in range(3)]
        for finished in engine.generate([request(p, rng.randrange(1, 40), temperature=0.8) for p in prompts]):
            assert_matches_reference(engine.model.hf, finished)


def test_a_request_has_the_same_bits_alone_and_among_others(folder: Path) -> None:
    def bits(number: int, prompt: list[int]) -> Any:
        return request(prompt, 12, temperature=0.9, sampling_seed=number)

    prompts = some_prompts(9)
    with running_engine(folder, enable_deterministic_inference=True) as engine:
        together = engine.generate([bits(n, p) for n, p in enumerate(prompts)])
        for number, (prompt, finished) in enumerate(zip(prompts, together, strict=True)):
            [alone] = engine.generate([bits(number, prompt)])
            assert alone.output_ids == finished.output_ids
            assert alone.output_logprobs == finished.output_logprobs


def test_weights_come_and_are_proven_by_the_names_of_single_experts(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    with running_engine(folder) as engine:
        store = engine.weights
        assert set(store.names) == set(stored)
        assert store.checksums() == {name: checksum_tensor(tensor) for name, tensor in stored.items()}
        changed = {name: tensor + 0.125 for name, tensor in stored.items()}
        store.release()
        store.restore()
        store.replace(list(changed.items()), complete=True)
        engine.decoder.refresh()
        assert store.half_updated is None
        assert store.checksums() == {name: checksum_tensor(tensor) for name, tensor in changed.items()}
        whole = engine.model.hf.model.layers[1].mlp.experts.gate_up_proj
        assert torch.equal(whole[3, 24:], changed[EXPERT])
        [finished] = engine.generate([request([3, 4, 5], 8, temperature=1.0)])
        assert_matches_reference(engine.model.hf, finished)


def test_an_expert_of_another_shape_and_the_name_of_all_experts_are_refused(folder: Path) -> None:
    with running_engine(folder) as engine:
        with pytest.raises(RequestRefused, match=rf"{EXPERT} has shape \[32, 24\], the engine's is \[24, 32\]"):
            engine.weights.replace([(EXPERT, torch.zeros(32, 24))], complete=False)
        with pytest.raises(RequestRefused, match=r"experts.gate_up_proj is not a parameter"):
            engine.weights.replace(
                [("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(6, 48, 32))], complete=False
            )
