import numpy as np
import pytest
from safetensors.numpy import save_file

from miles.config import checks_precision, resources
from miles.config.checks import CHECKS
from miles.config.checks_gpu import GPU_CHECKS
from miles.config.checks_precision import PRECISION_CHECKS
from miles.config.compute import compiles_layers, keeps_gathered, recompute_of
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.plan import describe_plan
from miles.config.preflight import PREFLIGHT
from miles.config.resources import machine_cores, offload_threads, offloads_train, resolved_threads


def config_of(*words):
    return read(["--hf-checkpoint", "m", "--num-rollout", "1", "--rm-type", "exact", *words]).config


def told(checks, *words):
    return [f"{i.path}: {i.problem} -> {i.fix}" for i in run_checks(checks, config_of(*words))]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_gradient_checkpointing_is_full_recomputation(cpu):
    assert recompute_of(config_of()) == "none"
    assert recompute_of(config_of("--recompute", "selective")) == "selective"
    assert recompute_of(config_of("--gradient-checkpointing")) == "full"
    assert recompute_of(config_of("--gradient-checkpointing", "--recompute", "full")) == "full"


def test_two_kinds_of_recomputation_are_refused(cpu):
    (text,) = [
        t
        for t in told(CHECKS, "--gradient-checkpointing", "--recompute", "selective")
        if t.startswith("train.recompute")
    ]
    assert text == (
        "train.recompute: --gradient-checkpointing computes whole layers again, --recompute selective all but attention "
        "-> give one of the two; --gradient-checkpointing is --recompute full"
    )
    assert not [t for t in told(CHECKS, "--gradient-checkpointing") if "recompute" in t]


def test_layers_are_compiled_on_a_gpu_unless_the_settings_say_otherwise(gpu, monkeypatch):
    assert compiles_layers(config_of())
    assert not compiles_layers(config_of("--compile-layers", "false"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not compiles_layers(config_of())
    assert compiles_layers(config_of("--compile-layers"))


def test_beside_a_gpu_torch_computes_with_one_thread_unless_told_otherwise(gpu):
    assert resolved_threads(config_of()) == 1
    assert resolved_threads(config_of("--torch-threads", "3")) == 3
    assert resolved_threads(config_of("--device", "cpu")) == machine_cores()


def test_ranks_that_update_on_the_cpu_share_its_cores(gpu, monkeypatch):
    monkeypatch.setattr(resources, "machine_cores", lambda: 7)
    assert offload_threads(config_of()) is None
    assert offload_threads(config_of("--fsdp-cpu-offload")) == 7
    assert offload_threads(config_of("--fsdp-cpu-offload", "--train-ranks", "2")) == 3
    assert offload_threads(config_of("--fsdp-cpu-offload", "--train-ranks", "8")) == 1
    assert offload_threads(config_of("--fsdp-cpu-offload", "--torch-threads", "5")) == 5
    assert resolved_threads(config_of("--fsdp-cpu-offload")) == 1


def test_on_a_cpu_nothing_is_left_to_offload_to_it(cpu):
    (text,) = [t for t in told(GPU_CHECKS, "--fsdp-cpu-offload") if t.startswith("train.cpu_offload")]
    assert text == (
        "train.cpu_offload: keeps what a GPU would hold in the CPU's memory, and this run is on CPU "
        "-> leave out --fsdp-cpu-offload"
    )


def test_the_plan_tells_threads_of_the_trainer_and_not_of_sglang(gpu):
    plan = [" ".join(line.split()) for line in describe_plan(config_of("--rollout-batch-size", "4"))]
    (engines,) = (line for line in plan if line.startswith("engines"))
    (trainer,) = (line for line in plan if line.startswith("trainer"))
    assert engines.endswith("1 logical CPU each")
    assert trainer.endswith("1 logical CPU and 1 thread each")


def test_a_trainer_leaves_its_device_only_for_engines(cpu):
    assert offloads_train(config_of("--colocate"))
    assert not offloads_train(config_of("--colocate", "--offload-train", "false"))
    assert not offloads_train(config_of("--colocate", "--loss-type", "sft_loss"))
    replay = ["--debug-train-only", "--load-debug-rollout-data", "data/{rollout_id}.jsonl"]
    assert not offloads_train(config_of("--colocate", "--offload-train", *replay))


def test_a_rank_alone_on_a_gpu_keeps_gathered_weights_unless_it_recomputes_all(gpu):
    assert keeps_gathered(config_of())
    assert not keeps_gathered(config_of("--recompute", "full"))
    assert not keeps_gathered(config_of("--train-ranks", "2"))
    assert not keeps_gathered(config_of("--fsdp-cpu-offload"))
    assert not keeps_gathered(config_of("--device", "cpu"))


def test_a_large_model_in_fp32_on_a_gpu_is_refused_and_a_small_one_is_not(gpu, tmp_path, monkeypatch):
    save_file({"a": np.zeros((50, 20), np.float32), "b": np.zeros(34, np.float32)}, tmp_path / "model.safetensors")
    words = ("--hf-checkpoint", str(tmp_path))
    assert told(PRECISION_CHECKS, *words) == []
    monkeypatch.setattr(checks_precision, "SMALL", 1000)
    assert told(PRECISION_CHECKS, *words) == [
        "train.bf16: a model of 1.03 thousand parameters would be trained in fp32, on a GPU several times slower than in "
        "bf16 -> --bf16; master weights, moments and gradient sums stay fp32"
    ]
    assert told(PRECISION_CHECKS, *words, "--bf16") == []
    assert told(PRECISION_CHECKS, *words, "--device", "cpu") == []
    assert set(PRECISION_CHECKS) <= set(PREFLIGHT)
