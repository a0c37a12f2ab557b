import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles.backends.fsdp_utils import roles
from tests.ci.register import register_cuda_ci
from tests.fast.fsdp.support import largest_difference, make_batch, make_config, open_worker, weights_of

register_cuda_ci(est_time=100, suite="stage-b-1-gpu-h200")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def samples(n=12, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for number in range(n):
        prompt, response = int(rng.integers(2, 20)), int(rng.integers(3, 60))
        found.append(
            {
                "tokens": rng.integers(0, VOCAB, prompt + response).tolist(),
                "loss_mask": [1.0] * response,
                "reward": float(rng.normal()),
                "sample_index": number,
                "trajectory": number,
            }
        )
    return found


def settings(device, **train):
    sections = {
        "cluster": {"device": device},
        "train": {"max_tokens_per_gpu": 300, "compile_layers": False, **train},
        "parity": {"enabled": False},
        "algorithm": {"entropy_coef": 0.01},
        "optimizer": {"lr": 1e-3},
    }
    return {name: dict(values) for name, values in sections.items()}


def trained(folder, tmp_path, device, steps=2, **train):
    with open_worker(make_config(folder, **settings(device, **train)), tmp_path) as worker:
        metrics = [worker.train(make_batch(samples(seed=step)), step) for step in range(steps)]
        scores = worker.score([s["tokens"] for s in samples(4, seed=9)], 0.9)
        return metrics, {name: tensor.cpu() for name, tensor in weights_of(worker).items()}, np.concatenate(scores)


@pytest.mark.parametrize("train", [{}, {"bf16": True}, {"bf16": True, "compile_layers": True}])
def test_a_gpu_trains_as_a_cpu_does(folder, tmp_path, train):
    expected, weights, scores = trained(folder, tmp_path, "cpu")
    found, ours, our_scores = trained(folder, tmp_path, "cuda", **train)
    loose = 1e-4 if not train else 3e-2
    for mine, theirs in zip(found, expected, strict=True):
        print(train, {k: (mine[k], theirs[k]) for k in ("train/loss", "train/grad_norm", "train/entropy_loss")})
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], abs=loose)
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=loose)
    assert largest_difference(ours, weights) < 5e-3
    assert np.abs(our_scores - scores).mean() < (1e-4 if not train else 0.05)


@pytest.mark.parametrize("compile_layers", [False, True])
def test_recomputation_changes_nothing_but_memory(folder, tmp_path, compile_layers):
    plain, *others = (
        trained(folder, tmp_path, "cuda", bf16=True, compile_layers=compile_layers, recompute=level)
        for level in ("none", "selective", "full")
    )
    for other in others:
        assert largest_difference(plain[1], other[1]) < 1e-4
        assert other[0][1]["train/grad_norm"] == pytest.approx(plain[0][1]["train/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_rank_alone_computes_what_fsdp_does(folder, tmp_path, monkeypatch, recompute):
    copies = trained(folder, tmp_path, "cuda", bf16=True, recompute=recompute)
    monkeypatch.setattr(roles, "keeps_gathered", lambda config: False)
    gathered = trained(folder, tmp_path, "cuda", bf16=True, recompute=recompute)
    assert largest_difference(copies[1], gathered[1]) < 1e-4
    assert copies[0][1]["train/grad_norm"] == pytest.approx(gathered[0][1]["train/grad_norm"], rel=1e-3)


def test_after_warming_up_neither_few_tokens_nor_many_compile_anything(tmp_path):
    # Wide enough that Inductor would choose another form of a reduction for many tokens.
    shape = {"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(vocab_size=VOCAB, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, **shape)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "wide")
    found = make_config(
        tmp_path / "wide", **settings("cuda", bf16=True, compile_layers=True, max_tokens_per_gpu=16384)
    )
    with open_worker(found, tmp_path) as worker:
        worker.warm_up()
        assert counters["stats"]["unique_graphs"] > 0
        counters.clear()
        for count in (4, 400):
            worker.train(make_batch(samples(count)), 0)
        worker.score([[1, 2, 3]], 1.0)
        assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("compile_layers", [False, True])
def test_weights_in_the_cpus_memory_are_trained_there(folder, tmp_path, compile_layers):
    plain = trained(folder, tmp_path, "cuda", bf16=True, compile_layers=compile_layers)
    before = torch.cuda.memory_allocated()
    sections = settings("cuda", bf16=True, compile_layers=compile_layers, cpu_offload=True)
    with open_worker(make_config(folder, **sections), tmp_path) as worker:
        metrics = [worker.train(make_batch(samples(seed=step)), step) for step in range(2)]
        scores = worker.score([s["tokens"] for s in samples(4, seed=9)], 0.9)
        kept = {name: tensor.cpu() for name, tensor in weights_of(worker).items()}
        worker.offload()
        assert torch.cuda.memory_allocated() - before < sum(tensor.nbytes for tensor in kept.values())
        assert {p.device.type for p in worker._roles.policy.parameters()} == {"cpu"}
        worker.save(str(tmp_path / "saved"))
        whole = worker.train(make_batch(samples(seed=2)), 2)
    assert metrics[1]["train/grad_norm"] == pytest.approx(plain[0][1]["train/grad_norm"], rel=1e-3)
    assert largest_difference(kept, plain[1]) < 1e-4
    assert np.abs(np.concatenate(scores) - plain[2]).mean() < 0.01
    with open_worker(make_config(folder, **settings("cuda", bf16=True)), tmp_path) as worker:
        worker.load(str(tmp_path / "saved"))
        assert largest_difference({n: t.cpu() for n, t in weights_of(worker).items()}, kept) == 0
        found = worker.train(make_batch(samples(seed=2)), 2)
    assert found["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_engines_get_gpu_tensors_of_their_type(folder, tmp_path, cpu_offload):
    sections = settings("cuda", bf16=True, cpu_offload=cpu_offload) | {"engine": {"dtype": "bfloat16"}}
    with open_worker(make_config(folder, **sections), tmp_path) as worker:
        found = dict(worker.hf_weights())
        assert {(tensor.device.type, tensor.dtype) for tensor in found.values()} == {("cuda", torch.bfloat16)}
        assert {name: tensor.nbytes for name, tensor in found.items()} == worker.expected_weights()


def test_a_saved_and_loaded_trainer_goes_on_in_the_same_bits(folder, tmp_path):
    config = make_config(folder, **settings("cuda", bf16=True))
    with open_worker(config, tmp_path) as worker:
        worker.train(make_batch(samples()), 0)
        worker.copy_state()
        worker.write_copy(str(tmp_path / "saved"))
        kept = weights_of(worker)
        worker.export_hf(str(tmp_path / "saved"), str(tmp_path / "export"))
        whole = worker.train(make_batch(samples(seed=1)), 1)
    exported = load_file(tmp_path / "export/model.safetensors", device="cuda")
    assert largest_difference(exported, kept) == 0
    with open_worker(config, tmp_path) as worker:
        worker.score([[1, 2, 3]], 1.0)
        worker.load(str(tmp_path / "saved"))
        assert largest_difference(weights_of(worker), kept) == 0
        assert worker.train(make_batch(samples(seed=1)), 1)["train/loss"] == pytest.approx(
            whole["train/loss"], rel=1e-4
        )


def test_an_offloaded_trainer_gives_the_gpu_back_and_returns_bit_by_bit(folder, tmp_path):
    with open_worker(make_config(folder, **settings("cuda", bf16=True)), tmp_path) as worker:
        worker.train(make_batch(samples()), 0)
        before, held = weights_of(worker), torch.cuda.memory_allocated()
        before = {name: tensor.cpu() for name, tensor in before.items()}
        worker.offload("optimizer")
        middle = torch.cuda.memory_allocated()
        worker.offload()
        assert torch.cuda.memory_allocated() < middle < held
        worker.onload("weights")
        assert largest_difference({n: t.cpu() for n, t in weights_of(worker).items()}, before) == 0
        worker.onload()
        worker.train(make_batch(samples(seed=1)), 1)
