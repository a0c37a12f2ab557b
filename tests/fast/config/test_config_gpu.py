import json

import pytest

from miles.config import checks_gpu, resources
from miles.config.checks_gpu import GPU_CHECKS
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.resources import GpuMemory, engine_backend, gpu_plan, resolved_device
from miles.utils.sglang_source import InstalledSglang

SGLANG = InstalledSglang("0.5.17", frozenset({"--mem-fraction-static", "--attention-backend", "--tp-size"}))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with so many GPUs, and SGLang installed or not."""

    def machine(gpus, sglang=SGLANG, heads=16):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        monkeypatch.setattr(checks_gpu, "installed_sglang", lambda: sglang)
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads, "dtype": "bfloat16"}))
        return str(tmp_path)

    return machine


def config_of(folder, *words):
    return read(["--hf-checkpoint", folder, "--num-rollout", "1", *words]).config


def told(folder, *words):
    return [f"{i.path}: {i.problem} -> {i.fix}" for i in run_checks(GPU_CHECKS, config_of(folder, *words))]


def test_gpus_are_counted_without_starting_cuda(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(resources, "_DEVICES", tmp_path)
    assert resources.machine_gpus() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    assert resources.machine_gpus() == ("GPU-aa", "GPU-bb")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resources.machine_gpus() == ()


def test_without_a_gpu_a_run_is_on_cpu_with_the_torch_engine(machine):
    config = config_of(machine(0, sglang=None))
    assert (resolved_device(config), engine_backend(config)) == ("cpu", "torch")
    assert gpu_plan(config).wanted == 0
    assert told(machine(0, sglang=None)) == []


def test_with_gpus_a_run_is_on_them_with_sglang(machine):
    config = config_of(machine(4), "--train-ranks", "2", "--rollout-engines", "2")
    assert (resolved_device(config), engine_backend(config)) == ("cuda", "sglang")
    assert gpu_plan(config).train == (("0",), ("1",))
    assert gpu_plan(config).engines == (("2",), ("3",))


def test_colocated_engines_take_the_trainers_gpus(machine):
    config = config_of(
        machine(4), "--colocate", "--train-ranks", "4", "--rollout-engines", "2", "--rollout-num-gpus-per-engine", "2"
    )
    assert gpu_plan(config).engines == (("0", "1"), ("2", "3"))
    assert gpu_plan(config).wanted == 4


@pytest.mark.parametrize(
    ("visible", "names"), [("-1", ()), ("0,-1,1", ("0",)), ("NoDevFiles", ()), (" 0 , 2", ("0", "2"))]
)
def test_the_first_word_that_names_no_gpu_ends_the_list_as_for_cuda(visible, names, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resources.machine_gpus() == names


def test_gpus_that_the_machine_does_not_have_are_told(machine, monkeypatch):
    folder = machine(4)
    assert told(folder) == []  # nothing tells which GPUs there are
    there = {"0": GpuMemory(1, 0), "GPU-aa": GpuMemory(1, 0)}
    monkeypatch.setattr(checks_gpu, "gpu_memory", lambda: there)
    monkeypatch.setattr(resources, "gpu_memory", lambda: there)
    assert told(folder) == [
        "CUDA_VISIBLE_DEVICES: names GPU 1, 2, 3, and this machine has 0 -> export CUDA_VISIBLE_DEVICES=0, or unset it"
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-aa")
    assert told(folder) == []


def test_too_few_gpus_are_told_with_what_would_fit(machine):
    assert told(machine(1)) == [
        "cluster.train_ranks: 1 trainer rank and 1 engine of 1 GPU need 2 GPUs, and 1 GPU is visible -> --colocate, which "
        "lets trainer and engines share GPUs, or a machine with more GPUs"
    ]
    assert told(machine(4), "--train-ranks", "8", "--rollout-engines", "2") == [
        "cluster.train_ranks: 8 trainer ranks and 2 engines of 1 GPU need 10 GPUs, and 4 GPUs are visible -> fewer "
        "--train-ranks and fewer --rollout-engines, or a machine with more GPUs"
    ]
    assert told(machine(2), "--colocate", "--rollout-num-gpus-per-engine", "4") == [
        "engine.gpus_per_engine: an engine of 4 GPUs does not fit this machine, where 2 GPUs are visible -> "
        "--rollout-num-gpus-per-engine 2"
    ]
    assert told(machine(2), "--rollout-num-gpus-per-engine", "2") == [
        "cluster.train_ranks: 1 trainer rank and 1 engine of 2 GPUs need 3 GPUs, and 2 GPUs are visible -> --colocate, "
        "which lets trainer and engines share GPUs, or fewer --rollout-num-gpus-per-engine, or a machine with more GPUs"
    ]
    assert told(machine(1), "--colocate") == []
    assert told(machine(0), "--device", "cuda")[0].startswith("cluster.device: no GPU is visible")
    assert told(machine(0), "--colocate")[0] == (
        "cluster.colocate: shares GPUs, and this run is on CPU -> leave out --colocate"
    )


def test_sglang_must_be_there_and_have_a_gpu(machine):
    assert told(machine(2, sglang=None)) == ["engine.backend: SGLang is not installed -> pip install 'miles[sglang]'"]
    assert told(machine(0), "--engine-backend", "sglang") == [
        "engine.backend: SGLang needs a GPU, and this run is on CPU -> --engine-backend torch"
    ]


def test_another_version_of_sglang_is_told_with_the_versions_that_work(machine):
    assert told(machine(2, sglang=InstalledSglang("0.5.18", frozenset()))) == []
    assert told(machine(2, sglang=InstalledSglang("0.5.2", frozenset()))) == [
        "engine.backend: SGLang 0.5.2 is installed, and Miles works with >=0.5.17,<0.6 -> pip install 'sglang>=0.5.17,<0.6'"
    ]


# Case H01.
def test_server_arguments_are_those_of_the_installed_sglang(machine):
    folder = machine(2)
    assert told(folder, "--sglang-mem-fraction-static", "0.6") == []
    assert told(folder, "--sglang-mem-fraction-statik", "0.6") == [
        "--sglang-mem-fraction-statik: SGLang 0.5.17 has no such server argument -> did you mean "
        "--sglang-mem-fraction-static?"
    ]
    assert told(folder, "--sglang-tp-size", "2") == [
        "--sglang-tp-size: follows from another setting -> use --rollout-num-gpus-per-engine"
    ]
    assert told(folder, "--sglang-port", "2") == ["--sglang-port: is set by Miles -> leave out --sglang-port"]


def test_the_torch_engine_takes_no_server_arguments(machine):
    assert told(machine(0), "--sglang-mem-fraction-static", "0.6") == [
        "engine.sglang: the torch engine does not take --sglang-mem-fraction-static -> --engine-backend sglang"
    ]


def test_heads_must_be_shared_evenly(machine):
    folder = machine(8, heads=14)
    assert told(folder, "--colocate", "--rollout-num-gpus-per-engine", "4") == [
        f"engine.gpus_per_engine: 4 GPUs cannot share the 14 attention heads of {folder} -> "
        "--rollout-num-gpus-per-engine 2"
    ]


@pytest.mark.parametrize(
    ("config", "size", "problem", "fitting"),
    [
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, 6, "8 key-value heads, nor hold whole copies,", 4),
        ({"num_attention_heads": 12, "intermediate_size": 100}, 3, "100 columns of the MLP", 2),
    ],
)
def test_what_gpus_cannot_share_is_named(machine, tmp_path, config, size, problem, fitting):
    folder = machine(8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert told(folder, "--colocate", "--rollout-num-gpus-per-engine", str(size)) == [
        f"engine.gpus_per_engine: {size} GPUs cannot share the {problem} of {folder} -> "
        f"--rollout-num-gpus-per-engine {fitting}"
    ]


def test_key_value_heads_are_copied_where_gpus_are_more(machine, tmp_path):
    folder = machine(8)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 16, "num_key_value_heads": 2}))
    assert told(folder, "--colocate", "--rollout-num-gpus-per-engine", "8") == []


def test_server_arguments_merge_by_name_over_a_recipe(machine, tmp_path):
    folder = machine(2)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("engine: {sglang: {mem_fraction_static: 0.5, attention_backend: triton}}\n")
    argv = [str(recipe), "--hf-checkpoint", folder, "--num-rollout", "1", "--sglang-mem-fraction-static", "0.7"]
    assert read(argv).config.engine.sglang == {"mem_fraction_static": "0.7", "attention_backend": "triton"}
