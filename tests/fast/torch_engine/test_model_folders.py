import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.torch_engine.model import load_model
from miles.backends.torch_engine.request import read_request
from miles.backends.torch_engine.settings import EngineSettings
from miles.errors import EngineError
from tests.fast.torch_engine.support import make_model


def load(folder: Path, **settings: Any) -> Any:
    return load_model(EngineSettings(str(folder), **settings))


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_refused(folder: Path, message: str, **settings: Any) -> None:
    with pytest.raises(EngineError) as caught:
        load(folder, **settings)
    assert re.search(message, str(caught.value)), caught.value


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere does not exist")


def test_a_folder_without_config_or_weights_says_what_it_holds(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_refused(folder, r"has no \*.safetensors weights; it holds .*config.json")
    (folder / "config.json").unlink()
    assert_refused(folder, "has no config.json; it holds .*tokenizer.json")


def test_a_broken_config_is_an_engine_error(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert_refused(folder, "is not a JSON object")


def test_another_family_lists_the_supported_ones(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="gpt2")
    assert_refused(folder, "type 'gpt2'; the torch engine runs Llama, Qwen2, Qwen3")


def test_missing_and_unknown_parameters_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weigth"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, "1 missing: model.norm.weight; 1 unknown: model.norm.weigth")


def test_parameters_of_another_shape_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, "model.norm.weight")


def test_a_tied_model_whose_file_holds_another_head_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder)
    weights["lm_head.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, "lm_head.weight and model.embed_tokens.weight differ")


def test_eos_comes_from_every_config_and_sampling_defaults_from_none(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 6], "temperature": 0.1, "top_k": 3, "repetition_penalty": 2.0})
    )
    model = load(folder)
    assert model.eos_token_ids == {1, 5, 6}
    params = read_request({"input_ids": [3]}, model, lambda _: None).params
    assert (params.temperature, params.top_k, params.top_p) == (1.0, -1, 1.0)


def test_a_context_beyond_the_model_is_refused_and_a_shorter_one_taken(folder: Path) -> None:
    assert_refused(folder, "--context-length 257 is more than .* 256", context_length=257)
    assert load(folder, context_length=100).context_length == 100


def test_a_sliding_window_limits_the_context(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert_refused(folder, "start it with --context-length 64")
    assert load(folder, context_length=64).context_length == 64


def test_rope_scaling_that_depends_on_the_batch_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert_refused(folder, "scales rotary positions by 'dynamic'")


def test_an_unusable_device_is_an_engine_error(folder: Path) -> None:
    assert_refused(folder, "device 'quantum' cannot be used", device="quantum")
