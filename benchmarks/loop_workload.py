"""What a benchmarked run works on: a model folder with random weights, a tokenizer of characters, prompts of one length."""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks.train_step import write_model
from examples.quickstart import make_task

LETTERS = "0123456789abcdefghij"
CONTEXT = 40_960
END, PAD = 1, 0


def write_folder(name: str, folder: Path, device: str) -> None:
    """A Qwen3 of the shape `name` with random bf16 weights, made on `device`, and the quickstart's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(name, folder, device)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config |= {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    config_path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    make_task.MAX_CONTEXT = CONTEXT
    make_task.write_tokenizer(folder)


def write_prompts(path: Path, count: int, length: int) -> None:
    """`count` prompts of `length` tokens each, all different."""
    rng = random.Random(0)
    rows = [{"input": "".join(rng.choices(LETTERS, k=length)), "label": "1"} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
