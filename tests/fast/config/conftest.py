import json
from pathlib import Path

import pytest

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without tensors."""
MODEL_CONFIG = {"model_type": "qwen3", "max_position_embeddings": 512}


class RunFiles:
    """A folder with a model, prompts and held-out prompts that pass every look at the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(MODEL_CONFIG))
        (self.model / "model.safetensors").write_bytes(NO_TENSORS)
        (self.model / "tokenizer.json").write_text("{}")
        self.prompts = root / "train.jsonl"
        self.prompts.write_text('{"input": "1 + 1", "label": "2"}\n')
        self.held_out = root / "test.jsonl"
        self.held_out.write_text('{"input": "2 + 2", "label": "4"}\n')

    def argv(self, *more: str) -> list[str]:
        required = {
            "--hf-checkpoint": str(self.model),
            "--prompt-data": str(self.prompts),
            "--label-key": "label",
            "--rm-type": "math",
            "--num-rollout": "3",
            "--num-cpus": "2",
            "--rollout-max-response-len": "64",
        }
        return [word for pair in required.items() for word in pair] + list(more)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)
