import json
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 <>|:.\n"
TEMPLATE = (
    "{{ bos_token }}{% if quiet %}q {% endif %}{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder with a character tokenizer that adds <bos> by default, and a template that starts with it too."""
    folder = tmp_path_factory.mktemp("model")
    vocab = {text: i for i, text in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from miles.utils.hf import load_tokenizer

    return load_tokenizer(model_folder)


@pytest.fixture
def write(tmp_path):
    """Write a data file from rows or text; gives its path."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        data = rows if isinstance(rows, bytes | str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(path)

    return write


@pytest.fixture
def write_parquet(tmp_path):
    """Write a Parquet file from rows; gives its path."""

    def write_parquet(rows, name="data.parquet", group=2):
        path = tmp_path / name
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
        return str(path)

    return write_parquet


@pytest.fixture
def make_args(model_folder):
    def make_args(path, **changes):
        values = {
            "prompt_data": path,
            "rm_type": None,
            "custom_rm_path": None,
            "prompt_data_weights": [],
            "disable_rollout_global_dataset": False,
            "accept_changed_data": False,
            "tool_key": "tools",
            "multimodal_keys": {},
            "num_epoch": None,
            "num_rollout": 1,
            "input_key": "input",
            "label_key": None,
            "metadata_key": "metadata",
            "apply_chat_template": False,
            "apply_chat_template_kwargs": {},
            "chat_template_path": None,
            "hf_checkpoint": str(model_folder),
            "rollout_shuffle": False,
            "rollout_seed": 42,
            "n_samples_per_prompt": 2,
            "rollout_max_prompt_len": None,
            "rollout_max_context_len": None,
            "rollout_max_response_len": 16,
            "buffer_filter_path": None,
        }
        return SimpleNamespace(**(values | changes))

    return make_args
