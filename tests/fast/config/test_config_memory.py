"""Predicted memory: against what was measured on an H200, against torch on a CPU, and what is told when it does not fit."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from miles.config import memory, memory_needs, memory_text, resources
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.memory import GIB, EngineNeeds, Needs, TrainerNeeds, on_the_host, predict, training_peak
from miles.config.memory_text import describe_memory, memory_suffices
from miles.config.model_size import described_shapes, model_size, size_of
from miles.config.resources import GpuMemory, read_gpu_memory

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
H200 = 143771 * 2**20
WIDTHS = {
    "0.6b": (1024, 3072, 28, 16),
    "1.7b": (2048, 6144, 28, 16),
    "4b": (2560, 9728, 36, 32),
    "8b": (4096, 12288, 36, 32),
    "32b": (5120, 25600, 64, 64),
    "moe": (2048, 6144, 8, 32),
}
EXPERTS = {
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip


def shape(name):
    hidden, inner, layers, heads = WIDTHS[name]
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": name in ("0.6b", "1.7b", "4b", "moe"), "max_position_embeddings": 40960, "dtype": "bfloat16",
        **(EXPERTS if name == "moe" else {}),
    }  # fmt: skip


def sized(name):
    return size_of(shape(name), described_shapes(shape(name)))


def test_the_peak_of_a_step_is_what_was_measured_on_an_h200():
    rows = json.loads((RESULTS / "train_step_h200.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {"0.6b", "1.7b", "4b", "moe"}
    for row in rows:
        needs = TrainerNeeds(policy=sized(row["model"]), tokens=row["tokens"], several=False)
        predicted = sum(training_peak(needs, H200).values()) / GIB
        assert row["peak_gib"] * 0.97 <= predicted <= row["peak_gib"] * 1.05, (row["model"], predicted)


def tiny_config(kind, **changes):
    from transformers import AutoConfig

    widths = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128,
    }  # fmt: skip
    if kind == "qwen3_moe":
        widths |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    return AutoConfig.for_model(kind, **(widths | changes))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_size_by_config_json_and_by_headers_is_that_of_the_model(kind, tied, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(kind, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    stored = model_size(tmp_path)
    assert stored is not None
    assert stored.parameters == model.num_parameters()
    (tmp_path / "model.safetensors").unlink()
    described = model_size(tmp_path)
    assert described is not None
    assert sorted(described.tensors) == sorted(stored.tensors)
    assert dataclasses.replace(described, tensors=()) == dataclasses.replace(stored, tensors=())
    assert stored.root == 64 * (97 if tied else 2 * 97) + 64


def test_a_damaged_or_foreign_folder_has_no_known_size(tmp_path):
    assert model_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 4}')
    assert model_size(tmp_path) is None
    save_file({"x": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert model_size(tmp_path) is None


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_activations_of_an_eager_layer_are_what_torch_saves(kind):
    """Bytes that autograd keeps of a real model's decoder layers, each storage once and weights left out."""
    from transformers import AutoModel

    config = tiny_config(kind, hidden_size=128, intermediate_size=384, num_attention_heads=8)
    model = AutoModel.from_config(config, attn_implementation="sdpa").to(torch.bfloat16)
    saved = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor  # kept alive, so that no place is taken twice
        return tensor

    tokens = 512
    config.max_position_embeddings = tokens
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / tokens / config.num_hidden_layers
    size = size_of(config.to_dict(), described_shapes(config.to_dict()))
    kept, whole = memory._activations(TrainerNeeds(policy=size, compiled=False))
    assert kept == whole
    assert measured * 0.9 <= kept <= measured * 1.2, (measured, kept)


def test_recomputation_and_ranks_take_less():
    def peak(**changes):
        return sum(training_peak(TrainerNeeds(policy=sized("4b"), tokens=16384, **changes), H200).values())

    levels = [peak(recompute=level) for level in ("none", "selective", "full")]
    assert levels == sorted(levels, reverse=True)
    assert peak(ranks=4) < peak(ranks=2) < peak()
    assert peak(bf16=False) > peak()
    assert peak(compiled=False) > peak()
    assert peak(several=True) > peak(several=False)
    assert peak(whole_logits=True) > peak()


def test_what_is_in_the_cpus_memory_takes_no_memory_of_a_gpu():
    needs = Needs(trainer=TrainerNeeds(policy=sized("8b"), tokens=16384, cpu_offload=True), engine=None)
    plain = dataclasses.replace(needs, trainer=dataclasses.replace(needs.trainer, cpu_offload=False))
    (prediction,), (other,) = predict(needs, H200), predict(plain, H200)
    names = {name for parts in prediction.phases.values() for name in parts}
    assert not names & {"trainer: weights", "trainer: optimizer", "trainer: gradients"}
    held = 16 * sized("8b").parameters
    for phase in ("training", "publish"):
        assert other.total(phase) - prediction.total(phase) > (0.7 if phase == "publish" else 1) * held
    assert held < on_the_host(dataclasses.replace(needs.trainer, several=False)) < on_the_host(needs.trainer)


def test_on_the_host_weights_and_gradients_are_pinned_and_moments_are_not():
    size = dataclasses.replace(sized("0.6b"), tensors=(1000, 1024), parameters=2024)
    trainer = TrainerNeeds(policy=size, cpu_offload=True, several=False)
    assert on_the_host(trainer) == 2 * (4096 + 4096) + 8 * 2024
    assert on_the_host(dataclasses.replace(trainer, several=True)) == 3 * (4096 + 4096) + 8 * 2024
    assert on_the_host(dataclasses.replace(trainer, reference=size)) == 3 * (4096 + 4096) + 8 * 2024


def test_pinned_memory_comes_in_powers_of_two():
    size = dataclasses.replace(sized("0.6b"), tensors=(1000, 1024))
    assert on_the_host(TrainerNeeds(policy=size)) == 3 * (4096 + 4096)
    assert on_the_host(TrainerNeeds(policy=size, reference=size, ranks=2)) == 2 * 4 * (2048 + 2048)


def test_an_engine_takes_its_fraction_and_leaves_less_when_it_chooses_itself():
    engine = EngineNeeds(model=sized("0.6b"), fraction=0.5)
    assert engine.static(H200) == H200 // 2
    parts = predict(Needs(trainer=None, engine=engine), H200)[0].phases["rollout"]
    assert 70 < sum(parts.values()) / GIB < 73  # 72 GiB were seen, with 1.8 GiB left when it had given up all it can
    chosen = dataclasses.replace(engine, fraction=None, saves_memory=True).static(H200)
    assert 0.88 < chosen / H200 < 0.93
    assert engine.kv_per_token == 2 * 28 * 8 * 128 * 2
    assert dataclasses.replace(engine, tp=16).kv_per_token == 2 * 28 * 128 * 2


def test_who_is_on_the_gpus_at_the_same_time_follows_the_turns():
    needs = Needs(
        trainer=TrainerNeeds(policy=sized("0.6b")), engine=EngineNeeds(model=sized("0.6b"), fraction=0.5), shares=True,
        offloads_train=True, given_up=frozenset({"kv_cache", "weight"}),
    )  # fmt: skip
    (found,) = predict(needs, H200)
    parts = {phase: set(found.phases[phase]) for phase in found.phases}
    assert parts["rollout"] == {"trainer: CUDA", "engine: weights", "engine: KV", "engine: CUDA, graphs"}
    assert {name for name in parts["training"] if name.startswith("engine")} == {"engine: CUDA, graphs"}
    assert {name for name in parts["publish"] if name.startswith("engine")} == {
        "engine: weights",
        "engine: CUDA, graphs",
    }
    assert {"trainer: weights", "trainer: optimizer", "trainer: buckets", "engine: KV"} <= parts["start"]
    only_kv = predict(dataclasses.replace(needs, given_up=frozenset({"kv_cache"})), H200)[0].phases
    assert "engine: weights" in only_kv["training"]
    assert "engine: KV" not in only_kv["training"]
    apart = predict(dataclasses.replace(needs, shares=False, engines=2), H200)
    assert [(p.first, p.last) for p in apart] == [(0, 0), (1, 2)]
    assert not any(name.startswith("engine") for name in apart[0].phases["training"])
    wide = predict(dataclasses.replace(needs, engines=2, trainer=TrainerNeeds(policy=sized("0.6b"), ranks=4)), H200)
    assert [(p.first, p.last) for p in wide] == [(0, 1), (2, 3)]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with so many GPUs of so many GiB each, and a model folder of a shape."""

    def machine(gpus, gib, shape_name, *, used=0.0, host=10000.0):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        told = {str(i): GpuMemory(int(gib * GIB), int(used * GIB)) for i in range(gpus)} if gib else {}
        monkeypatch.setattr(resources, "gpu_memory", lambda: told)
        monkeypatch.setattr(memory_text, "host_memory", lambda: int(host * GIB))
        (tmp_path / "config.json").write_text(json.dumps(shape(shape_name)))
        return str(tmp_path)

    return machine


def config_of(folder, *words):
    argv = ["--hf-checkpoint", folder, "--num-rollout", "1", "--bf16", *words]
    return read(argv).config


def told(folder, *words):
    return [f"{i.path}: {i.problem} -> {i.fix}" for i in run_checks((memory_suffices,), config_of(folder, *words))]


COLOCATED = ("--colocate", "--max-tokens-per-gpu", "16384", "--rollout-max-context-len", "2048")


def test_the_run_that_was_made_on_one_h200_is_let_through(machine):
    folder = machine(1, 139.8, "0.6b")
    assert told(folder, *COLOCATED, "--sglang-mem-fraction-static", "0.5") == []


def test_a_step_that_does_not_fit_is_told_with_its_parts_and_what_makes_it_fit(machine):
    folder = machine(1, 80, "4b")
    (text,) = told(folder, *COLOCATED, "--sglang-mem-fraction-static", "0.3")
    head, _, fix = text.partition(" -> ")
    assert head.startswith("memory: training needs about 13")
    assert "GiB on GPU 0 and it has 80.0: trainer: activations 60.3, trainer: optimizer 30.0, trainer: " in head
    assert "--recompute full" in fix
    # The way out is one indeed.
    words = fix.split("; or ")[0].split(" with ")
    assert told(folder, *COLOCATED, "--sglang-mem-fraction-static", "0.3", *" ".join(words).split()) == []


def test_a_start_with_everything_there_is_told_with_the_fraction_that_fits(machine):
    folder = machine(1, 139.8, "1.7b")
    (text,) = told(folder, *COLOCATED)
    assert text.startswith("memory: start needs about 162.9 GiB on GPU 0 and it has 139.8: engine: KV 123.5")
    fix = text.partition(" -> ")[2].split("; or ")[0]
    assert fix.startswith("--sglang-mem-fraction-static 0.")
    assert told(folder, *COLOCATED, *fix.split()) == []


def test_more_ranks_are_named_where_the_machine_has_gpus(machine):
    words = ("--colocate", "--rollout-max-context-len", "4096", "--sglang-mem-fraction-static", "0.3")
    (text,) = told(machine(8, 79.6, "8b"), *words)
    assert text.endswith(" -> --train-ranks 8; or --check-memory false, to start all the same")
    assert told(machine(8, 79.6, "8b"), *words, "--train-ranks", "8") == []


def test_the_cpus_memory_is_named_last_and_where_it_is_large_enough(machine):
    words = (*COLOCATED, "--sglang-mem-fraction-static", "0.3")
    (text,) = told(machine(1, 79.6, "8b", host=512.0), *words)
    fix = text.partition(" -> ")[2].split("; or ")[0]
    assert fix.startswith("--fsdp-cpu-offload")
    assert told(machine(1, 79.6, "8b", host=512.0), *words, *fix.replace(" with ", " ").split()) == []
    assert any(
        "of 512.0 of the machine's memory for the trainer" in line and "away" not in line
        for line in describe_memory(config_of(machine(1, 79.6, "8b", host=512.0), *words, "--fsdp-cpu-offload"))
    )
    assert not any("--fsdp-cpu-offload" in text for text in told(machine(1, 79.6, "8b", host=100.0), *words))
    found = told(machine(1, 79.6, "8b", host=100.0), *words, "--fsdp-cpu-offload")
    assert any("--fsdp-cpu-offload keeps 1" in line and "of which there are 100.0" in line for line in found)


def test_a_model_for_which_nothing_helps_says_so(machine):
    (text,) = told(machine(1, 24, "32b"), *COLOCATED)
    assert "-> a smaller model, or more GPUs or larger ones: no change of settings makes it fit 1 such GPU; or" in text
    assert told(machine(1, 24, "32b"), *COLOCATED, "--check-memory", "false") == []


def test_memory_of_other_processes_counts_and_is_named(machine):
    words = (*COLOCATED, "--sglang-mem-fraction-static", "0.5")
    (text,) = told(machine(1, 139.8, "0.6b", used=100.0), *words)
    assert "it has 139.8, of which other processes hold 100.0" in text


def test_an_engine_must_hold_its_longest_request(machine):
    words = ("--recompute", "full", "--sglang-mem-fraction-static", "0.11", "--rollout-max-context-len", "40960")
    folder = machine(2, 80, "4b")
    (text,) = told(folder, *words)
    assert "an engine has 8.8 GiB of GPU 0 for weights and KV, and its weights take 7.5: room for " in text
    assert "and a request may have 40960" in text
    assert text.partition(" -> ")[2].startswith("--sglang-mem-fraction-static 0.95; or ")
    assert "requests of at most 5120 tokens (--rollout-max-context-len, --rollout-max-response-len)" in text
    # What the model could take, but no setting asks for, is no reason to refuse.
    assert told(folder, *words[:4]) == []


def test_host_memory_is_asked_for_the_trainer_that_leaves_and_for_loading(machine):
    words = (*COLOCATED, "--sglang-mem-fraction-static", "0.5")
    (text,) = told(machine(1, 139.8, "0.6b", host=6.0), *words)
    assert text == (
        "memory: a trainer that leaves its GPU takes 8.9 GiB of this machine's memory, of which there are 6.0 -> "
        "--offload-train false, if the engines fit beside it, or a machine with more memory; "
        "or --check-memory false, to start all the same"
    )
    (text,) = told(machine(4, 139.8, "0.6b", host=6.0), *words, "--train-ranks", "4")
    assert text.startswith(
        "memory: 4 trainer ranks load 8.9 GiB of weights in fp32 at the same time, and this machine"
    )


def test_without_nvidia_smi_nothing_is_predicted_and_that_is_said(machine):
    folder = machine(1, 0, "4b")
    assert told(folder, "--colocate") == []
    assert describe_memory(config_of(folder, "--colocate")) == [
        "not predicted: nvidia-smi does not tell how much memory the GPUs have"
    ]


def test_the_table_has_a_column_a_phase_and_sums(machine):
    folder = machine(1, 139.8, "0.6b")
    lines = describe_memory(config_of(folder, *COLOCATED, "--sglang-mem-fraction-static", "0.5"))
    assert lines[0].split() == ["GPU", "0,", "139.8", "GiB", "free", "start", "rollout", "training", "publish"]
    rows = {line[:34].strip(): line[34:].split() for line in lines[1:] if not line[0].isalnum()}
    assert rows["trainer: weights"] == ["2.2", "-", "2.2", "2.2"]
    assert rows["engine: KV"] == ["68.8", "68.8", "-", "-"]
    sums = [sum(float(row[i]) for name, row in rows.items() if name != "together" and row[i] != "-") for i in range(4)]
    assert np.allclose(sums, [float(cell) for cell in rows["together"]], atol=0.5)
    assert any(line.startswith("KV of ") for line in lines)
    assert lines[-1].startswith("8.9 GiB of 10000.0 of the machine's memory for the trainer")


def test_on_a_cpu_only_what_cannot_be_is_refused(machine):
    folder = machine(0, 0, "4b", host=61.0)
    (text,) = told(folder)
    assert text.startswith(
        "memory: the run holds at least 67.4 GiB, and this machine has 61.0: trainer: optimizer 30.0"
    )
    folder = machine(0, 0, "4b", host=70.0)
    assert told(folder) == []
    assert describe_memory(config_of(folder))[0].startswith("at least 67.4 GiB of the 70.0 that this machine has: ")
    assert describe_memory(config_of(folder, "--debug-rollout-only")) == ["not predicted: nothing is trained"]


def test_memory_of_gpus_is_read_by_number_and_uuid(monkeypatch):
    found = read_gpu_memory("0, GPU-aa-1, 143771, 512\n1, GPU-ab-2, 143771, [N/A]\nsomething else\n")
    assert set(found) == {"0", "GPU-aa-1"}
    assert found["0"] == GpuMemory(143771 * 2**20, 512 * 2**20)
    monkeypatch.setattr(resources, "gpu_memory", lambda: found)
    assert resources.memory_of_gpu("GPU-aa") == found["0"]
    assert resources.memory_of_gpu("3") is None


def test_the_least_of_machine_and_container_is_the_hosts_memory(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemTotal:  2048 kB\n")
    (tmp_path / "max").write_text("max\n")
    monkeypatch.setattr(resources, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(resources, "_MEMORY_LIMITS", (tmp_path / "max", tmp_path / "absent"))
    assert resources.host_memory() == 2048 * 1024
    (tmp_path / "max").write_text("4096\n")
    assert resources.host_memory() == 4096
    monkeypatch.setattr(resources, "_MEMINFO", tmp_path / "absent")
    monkeypatch.setattr(resources, "_MEMORY_LIMITS", ())
    assert resources.host_memory() is None


def test_constants_are_those_of_the_code_that_they_describe():
    from miles.backends.fsdp_utils import model, roles
    from miles.backends.training_utils import fused_head, log_probs

    assert memory.UNIT_PARAMETERS == model.UNIT_PARAMETERS
    assert memory.KEPT_LOGITS == roles.KEPT_LOGITS
    assert memory.HEAD_CHUNK == fused_head.CHUNK_LOGITS
    assert 10 * log_probs.CHUNK_ELEMENTS["cuda"] == memory.PLAIN_CHUNK_BYTES
    assert memory_needs.BYTES["bfloat16"] == torch.bfloat16.itemsize
