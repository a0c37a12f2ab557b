import numpy as np
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

from miles.backends.fsdp_utils.model import load_policy
from miles.backends.fsdp_utils.packed_attention import packed_attention
from miles.backends.training_utils.packing import FlatBatch, SequenceLayout
from miles.errors import CheckpointError, TrainingError
from tests.fast.fsdp.support import VOCAB, make_model_folder

LENGTHS = (30, 12, 11, 3, 2, 64, 64, 50, 61, 2)
KINDS = {
    "plain": {},
    "sliding window": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return load_policy(make_model_folder(tmp_path_factory.mktemp("packed") / "m", **KINDS[request.param]))[0]


def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]


def gradients(model, batch, parts):
    model.zero_grad()
    logprobs_R = torch.zeros(len(batch.mask_R))
    for samples in parts:
        part = batch.micro_batch(np.asarray(samples))
        logprobs, entropy = model(part, 0.7, entropy=True)
        mix = torch.cos(part.entries_N.float())
        ((mix * logprobs).sum() + 0.1 * entropy.sum()).backward()
        logprobs_R[part.entries_N] = logprobs.detach()
    return logprobs_R, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("parts", [[range(10)], [[5, 9, 0], [1, 2, 3, 4], [6, 7, 8]]])
def test_a_pack_has_the_values_and_gradients_of_its_sequences_alone(model, parts):
    batch = FlatBatch.from_sequences(sequences())
    alone, grads_alone = gradients(model, batch, [[b] for b in range(10)])
    packed, grads = gradients(model, batch, parts)
    assert float((packed - alone).norm() / alone.norm()) <= 1e-6
    for name, grad in grads_alone.items():
        assert float((grads[name] - grad).norm() / grad.norm()) <= 1e-6, name


# Case B27.
def test_log_probs_are_those_of_the_models_own_logits_one_place_earlier(model, tmp_path):
    tokens = [5, 6, 7, 8]
    batch = FlatBatch(np.array(tokens), np.array([4]), np.array([2]), np.ones(2, np.float32), np.array([0]))
    model.hf.set_attn_implementation("sdpa")
    with torch.no_grad():
        whole = torch.log_softmax(model.hf(torch.tensor([tokens])).logits[0], dim=-1)
    model.hf.set_attn_implementation("miles_packed")
    (found,) = model(batch.micro_batch(np.array([0])), 1.0)
    expected = torch.stack([whole[1, 7], whole[2, 8]])
    shifted = torch.stack([whole[2, 7], whole[3, 8]])
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)
    assert float((found.detach() - shifted).abs().max()) > 1e-2


def test_whole_logits_are_of_the_predicted_tokens_and_tempered(model):
    batch = FlatBatch.from_sequences(sequences()[:3])
    part = batch.micro_batch(np.arange(3))
    logprobs, entropy, logits = model(part, 0.5, entropy=True, logits=True)
    log_p = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(log_p.gather(1, part.targets_N[:, None]).squeeze(1), logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(-(log_p.exp() * log_p).sum(1), entropy, rtol=0, atol=1e-5)
    assert logits.requires_grad


def test_no_token_of_a_pack_sees_another_sequence(model):
    one, other = sequences()[7], sequences()[5]
    changed = [(t + 1) % VOCAB for t in other]
    scores = []
    for neighbour in (other, changed):
        batch = FlatBatch.from_sequences([one, neighbour])
        part = batch.micro_batch(np.arange(2))
        (logprobs,) = model(part, 1.0)
        scores.append(logprobs[part.entries_N < len(one) - 1])
    assert torch.equal(*scores)


def test_a_model_whose_convolutions_look_across_borders_is_refused(tmp_path):
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        initializer_range=0.5,
    )
    Lfm2ForCausalLM(config).save_pretrained(tmp_path / "lfm2")
    with pytest.raises(
        CheckpointError, match=r"layers of lfm2 are of kind conv, whose state(.|\n)*fix: choose a model"
    ):
        load_policy(tmp_path / "lfm2")


def test_attention_that_is_more_than_causal_is_refused():
    query, layout = torch.randn(1, 2, 4, 8), SequenceLayout.of([4])
    module = torch.nn.Linear(1, 1)
    for more, what in (
        ({"softcap": 30.0}, "softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_mask": torch.ones(4, 4)}, "attention_mask"),
        ({"sequence_layout": None}, "borders"),
    ):
        given = {"attention_mask": None, "sequence_layout": layout, **more}
        with pytest.raises(TrainingError, match=rf"{what}(.|\n)*fix: use a model with plain causal attention"):
            packed_attention(module, query, query, query, **given)


def test_what_a_sequence_costs_is_counted_from_the_models_matrices(tmp_path):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    model, _ = load_policy(tmp_path / "llama")
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    assert model.flops.linear == 2 * (2 * layer + VOCAB * 32)
    assert model.flops.quadratic == 2 * 2 * 32
    tied, _ = load_policy(make_model_folder(tmp_path / "tied"))
    untied, _ = load_policy(make_model_folder(tmp_path / "untied", tied=False))
    assert tied.flops == untied.flops
