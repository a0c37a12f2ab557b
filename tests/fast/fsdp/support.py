"""A tiny Qwen3 folder, batches for it, and workers in this process."""

import contextlib
import json
import uuid
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles.backends.fsdp_utils.worker import FsdpTrainWorker
from miles.config.schema import RunConfig
from miles.core.train_batch import Column, TrainBatch

VOCAB = 24


def make_model_folder(folder: Path, *, seed=0, tied=True, dtype=torch.float32, **changes) -> Path:
    torch.manual_seed(seed)
    changes.setdefault("num_hidden_layers", 2)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        **changes,
    )
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"vocab": "of the test"}))
    return folder


def make_config(folder: Path, **sections) -> RunConfig:
    sections.setdefault("model", {})["hf_checkpoint"] = str(folder)
    sections.setdefault("optimizer", {}).setdefault("lr", 1e-2)
    return RunConfig.model_validate(sections)


@contextlib.contextmanager
def open_worker(config: RunConfig, tmp_path: Path, total_steps=100, facts=None):
    init = f"file://{tmp_path}/rendezvous-{uuid.uuid4().hex}"
    worker = FsdpTrainWorker(
        config, rank=0, world_size=1, init_method=init, total_optimizer_steps=total_steps, threads=1, facts=facts
    )
    try:
        yield worker
    finally:
        worker.close()


def make_samples(n=8, seed=0) -> list[dict]:
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(n):
        prompt, response = int(rng.integers(2, 6)), int(rng.integers(3, 9))
        samples.append(
            {
                "tokens": rng.integers(0, VOCAB, prompt + response).tolist(),
                "loss_mask": [1.0] * (response - 1) + [float(rng.random() < 0.5)],
                "reward": float(rng.normal()),
                "sample_index": 500 + number,
                "trajectory": number,
            }
        )
    return samples


def make_split_samples(n=6) -> list[dict]:
    """Trajectories of two samples each, which small micro-batches tear apart."""
    samples = make_samples(n)
    return [{**s, "trajectory": b // 2, "reward": samples[b // 2]["reward"]} for b, s in enumerate(samples)]


def make_batch(samples: list[dict]) -> TrainBatch:
    kinds = {
        "tokens": ("token", "int64"),
        "loss_mask": ("response", "float32"),
        "rollout_log_probs": ("response", "float32"),
        "reward": ("sample", "float32"),
        "sample_index": ("sample", "int64"),
        "trajectory": ("sample", "int64"),
        "group_index": ("sample", "int64"),
        "weight_version": ("sample", "int64"),
    }
    return TrainBatch(
        columns={name: Column.from_rows([s[name] for s in samples], *kinds[name]) for name in samples[0]}
    )


def with_log_probs(samples: list[dict], scores: list[list[float]]) -> list[dict]:
    return [{**s, "rollout_log_probs": row[-len(s["loss_mask"]) :]} for s, row in zip(samples, scores, strict=True)]


def scored_batch(worker: FsdpTrainWorker, samples: list[dict], temperature=1.0) -> TrainBatch:
    return make_batch(with_log_probs(samples, worker.score([s["tokens"] for s in samples], temperature)))


def weights_of(worker: FsdpTrainWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.hf_weights()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
