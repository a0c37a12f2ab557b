"""The quickstart's recipe over a tiny Qwen3-MoE, as a whole run of two steps."""

import math
import shutil

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.quickstart.make_task import EOS, MAX_CONTEXT, PAD, VOCABULARY
from tests.fast.ray.conftest import ROOT, TrainProcess, metrics

LAYERS, EXPERTS = 2, 8


async def reward_digits(args, sample, **kwargs):
    """Dense enough that an untrained model gets different rewards."""
    return sum(c.isdigit() for c in sample.response) / 6


def make_moe(task, folder):
    """The quickstart's tokenizer beside random weights of 8 experts, two for each token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
    )
    shutil.copytree(task / "model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_quickstart_trains_a_mixture_of_experts_and_exports_it_by_single_experts(task, tmp_path):
    model, run_dir = make_moe(task, tmp_path / "model"), tmp_path / "run"
    ended = TrainProcess(
        str(ROOT / "recipes" / "quickstart-grpo.yaml"), "--hf-checkpoint", str(model),
        "--prompt-data", str(task / "train.jsonl"), "--run-dir", str(run_dir),
        "--custom-rm-path", f"{__name__}.reward_digits", "--num-rollout", "2", "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6", "--eval-interval", "null",
        "--save-interval", "2", "--torch-threads", "1", "--run.use-tensorboard", "false",
    ).end()  # fmt: skip
    assert ended.status == 0, ended.err
    assert ended.left_behind == []
    steps = [row for row in metrics(run_dir) if "train/loss" in row]
    assert [row["step"] for row in steps] == [0, 1]
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/grad_norm"] > 0
        assert row["train/skipped_steps"] == 0
        assert row["train/rollout_logprob_abs_diff_mean"] < 1e-4

    exported = run_dir / "checkpoints" / "iter_0000002" / "hf"
    before, after = (load_file(folder / "model.safetensors") for folder in (model, exported))
    assert before.keys() == after.keys()
    experts = [name for name in after if ".experts." in name]
    assert len(experts) == LAYERS * EXPERTS * 3
    assert sum(not torch.equal(after[name], before[name]) for name in experts) > len(experts) // 2
    assert not torch.equal(after["model.layers.0.mlp.gate.weight"], before["model.layers.0.mlp.gate.weight"])
    _, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
