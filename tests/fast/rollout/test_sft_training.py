"""Supervised fine-tuning from a conversation of two turns to the trainer's weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from miles.core.samples import Sample
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.sft_rollout import generate_rollout
from miles.rollout.train_data_conversion import to_train_batch
from tests.fast.fsdp.support import largest_difference, open_worker
from tests.fast.rollout.support import CHARACTERS, SPECIALS, make_args, write_rows

OPTIMIZER = {"lr": 1.0, "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_eps": 1.0, "clip_grad": 0.0}
ROWS = [
    {"input": [{"role": r, "content": c} for r, c in (("user", "1+1="), ("assistant", "2"), *more)]}
    for more in (
        [("user", "and 3?"), ("assistant", "5")],
        [("user", "why?"), ("assistant", "so."), ("user", "2"), ("assistant", "4")],
    )
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Settings of a run on two conversations, and the model in its folder."""
    folder = tmp_path_factory.mktemp("sft")
    args = make_args(
        folder,
        data={"prompt_data": write_rows(folder / "chats.jsonl", ROWS), "label_key": None},
        algorithm={"loss_type": "sft_loss", "calculate_per_token_loss": True},
        rollout={"batch_size": 2, "n_samples_per_prompt": 1},
        optimizer=OPTIMIZER,
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(SPECIALS) + len(CHARACTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(args.hf_checkpoint)
    return args


def trained_by_hand(folder: str, samples: list[Sample], masks: list[list[int]]) -> dict[str, torch.Tensor]:
    """Weights after one step on the mean of -log-prob over the tokens that `masks` choose, each sample by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.5, 0.5), eps=1.0, weight_decay=0.0)
    total = sum(sum(mask) for mask in masks)
    for sample, mask in zip(samples, masks, strict=True):
        tokens_T = torch.tensor([sample.tokens])
        logprobs_T = model(tokens_T).logits[0, :-1].log_softmax(-1).gather(1, tokens_T[0, 1:, None])[:, 0]
        chosen_R = torch.tensor(mask, dtype=torch.float32)
        (-(logprobs_T[-len(mask) :] * chosen_R).sum() / total).backward()
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_the_gradient_of_several_turns_comes_from_the_assistants_tokens_alone(run, tmp_path):
    rollout = generate_rollout(RolloutFnConstructorInput(run, RolloutDataSourceWithBuffer(run)))
    groups = rollout(RolloutFnTrainInput(0)).samples
    samples = [group[0] for group in groups]
    assert [sum(s.loss_mask) for s in samples] == [4, 8]
    assert all(0 in s.loss_mask for s in samples)
    with open_worker(run.config, tmp_path) as worker:
        before = {name: t.clone() for name, t in worker.hf_weights()}
        metrics = worker.train(to_train_batch(groups, require_rewards=False), 0)
        moved = {name: t - before[name] for name, t in worker.hf_weights()}
    assert metrics["train/trainable_tokens"] == 12
    expected = trained_by_hand(run.hf_checkpoint, samples, [s.loss_mask for s in samples])
    size = max(float(t.abs().max()) for t in expected.values())
    assert largest_difference(moved, {name: expected[name] for name in moved}) < 1e-5 * size
    unmasked = trained_by_hand(run.hf_checkpoint, samples, [[1] * s.response_length for s in samples])
    assert largest_difference(moved, {name: unmasked[name] for name in moved}) > 0.05 * size
