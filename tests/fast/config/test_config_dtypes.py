import json

import pytest

from miles.config.resources import engine_dtype, parity_bounds, parity_only_warns
from miles.config.schema import RunConfig

FP32, BF16 = (1e-3, 1e-2), (0.06, 0.3)


def config(folder, **sections):
    return RunConfig.model_validate({"model": {"hf_checkpoint": str(folder)}, **sections})


@pytest.fixture
def folder(tmp_path):
    def make(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({}, "float32"),
        ({"dtype": 1}, "float32"),
    ],
)
def test_engines_take_the_data_type_of_the_folder(folder, fields, dtype):
    assert engine_dtype(config(folder(**fields))) == dtype
    assert engine_dtype(config(folder(**fields), engine={"dtype": "bfloat16"})) == "bfloat16"


def test_a_config_that_names_no_data_type_leaves_it_to_the_weights(folder):
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder() / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert engine_dtype(config(folder())) == "bfloat16"
    (folder() / "model.safetensors").write_bytes(b"cut")
    assert engine_dtype(config(folder())) == "float32"


def test_parity_bounds_follow_what_trainer_and_engines_compute_in(folder):
    path = folder(dtype="float32")
    assert parity_bounds(config(path)) == FP32
    assert parity_bounds(config(path, train={"bf16": True})) == BF16
    assert parity_bounds(config(path, engine={"dtype": "bfloat16"})) == BF16
    assert parity_bounds(config(folder(dtype="bfloat16"))) == BF16
    assert parity_bounds(config(folder(dtype="bfloat16"), parity={"max_p99_diff": 0.05})) == (0.06, 0.05)


def test_beyond_its_bounds_a_mixture_of_experts_in_bf16_warns_unless_they_were_set(folder):
    path = folder(dtype="bfloat16", num_experts=8)
    assert parity_bounds(config(path)) == (0.15, 1.5)
    assert parity_only_warns(config(path))
    assert not parity_only_warns(config(path, parity={"max_p99_diff": 0.5}))
    assert not parity_only_warns(config(folder(dtype="float32", num_experts=8)))
    assert not parity_only_warns(config(folder(dtype="bfloat16")))
