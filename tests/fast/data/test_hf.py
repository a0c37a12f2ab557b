import json
import subprocess
import sys

import pytest

from miles.errors import CheckpointError, ConfigError
from miles.utils.hf import context_length, eos_token_ids, load_tokenizer, special_token_texts


def test_a_folder_without_tokenizer_says_what_is_there_and_what_to_copy(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer in this folder \(found: config.json\)[\s\S]*fix: copy"):
        load_tokenizer(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone: no such folder[\s\S]*downloads nothing"):
        load_tokenizer(tmp_path / "gone")


def test_a_tokenizer_that_needs_its_own_code_is_refused(tmp_path):
    config = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["tok.MyTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tok.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(CheckpointError, match="which Miles never runs"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_a_checkpoint_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_template_file_replaces_the_tokenizers_own(model_folder, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    assert load_tokenizer(model_folder, str(template)).chat_template == "mine"
    with pytest.raises(ConfigError, match=r"chat_template_path: .*gone.jinja cannot be read"):
        load_tokenizer(model_folder, str(tmp_path / "gone.jinja"))


def test_the_generic_class_gives_the_ids_of_the_automatic_one(model_folder):
    from transformers import AutoTokenizer  # noqa: TID251

    text = "hi 12:<eos>\n"
    automatic = AutoTokenizer.from_pretrained(str(model_folder))
    assert load_tokenizer(model_folder)(text)["input_ids"] == automatic(text)["input_ids"]


def test_loading_a_generic_tokenizer_imports_no_torch(model_folder):
    code = (
        "import sys; from miles.utils.hf import load_tokenizer; "
        f"print(load_tokenizer({str(model_folder)!r})('hi')['input_ids'], 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert run.stdout == "[1, 10, 11] False\n", run.stderr


def test_context_length_is_read_from_where_families_keep_it(tmp_path):
    for config, expected in (
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 256}, 256),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert context_length(tmp_path) == expected
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        context_length(tmp_path)


def test_end_ids_are_those_of_both_configurations_and_else_the_tokenizers(model_folder, tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert eos_token_ids(tmp_path) == [5]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert eos_token_ids(tmp_path) == [5, 7]
    assert eos_token_ids(model_folder) == [2]


def test_special_tokens_are_read_without_the_library(model_folder):
    assert {"<bos>", "<eos>", "<pad>"} <= set(special_token_texts(model_folder))
