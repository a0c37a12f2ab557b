import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_model_folder,
    make_samples,
    open_worker,
    scored_batch,
    weights_of,
)

GRADIENT_AS_MOMENT = {"adam_beta1": 0.0, "clip_grad": 0.0}
"""With such a beta AdamW's first moment is the gradient, so a checkpoint holds it."""


def flat(tensors):
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def gradients(folder, tmp_path, **train):
    out = tmp_path / "-".join(map(str, train.values())) / "saved"
    config = make_config(folder, train=train, optimizer=dict(GRADIENT_AS_MOMENT), parity={"enabled": False})
    with open_worker(config, tmp_path) as worker:
        worker.train(make_batch(make_samples()), 0)
        worker.save(str(out))
    with SavedTrainer(out) as saved:
        assert {saved.whole(name).dtype for name in saved.shapes} == {torch.float32}
        return flat({name: saved.whole(name) for name in saved.shapes if name.startswith("exp_avg.")})


def test_gradients_are_those_of_fp32_but_for_rounding_and_are_summed_in_fp32(model_folder, tmp_path):
    exact = gradients(model_folder, tmp_path, bf16=False)
    for tokens in (8192, 30, 14):
        rounded = gradients(model_folder, tmp_path, bf16=True, max_tokens_per_gpu=tokens)
        assert 1e-3 < float((rounded - exact).norm() / exact.norm()) < 0.05
        fits_bf16 = float((rounded == rounded.bfloat16().float()).float().mean())
        # One micro-batch gives bf16 numbers; a sum of several that were still such would have been rounded.
        assert fits_bf16 == 1 if tokens == 8192 else fits_bf16 < 0.5


def test_scores_are_those_of_the_model_in_bf16(model_folder, tmp_path):
    sequences = [sample["tokens"] for sample in make_samples()]
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    with open_worker(make_config(model_folder, train={"bf16": True}), tmp_path) as worker, torch.no_grad():
        ours = worker.score(sequences, 0.9)
        logits = [model(torch.tensor([tokens])).logits[0, :-1].float() / 0.9 for tokens in sequences]
    theirs = [
        torch.log_softmax(rows, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        for rows, tokens in zip(logits, sequences, strict=True)
    ]
    difference = np.abs(np.concatenate(theirs) - np.concatenate(ours))
    assert difference.mean() < 1e-3
    assert np.quantile(difference, 0.99) < 1e-2


def test_updates_below_the_resolution_of_bf16_add_up(model_folder, tmp_path):
    moved = {}
    for bf16 in (False, True):
        config = make_config(
            model_folder,
            train={"bf16": bf16},
            optimizer={"lr": 5e-6, "clip_grad": 0.0, "adam_eps": 1e-3},
            parity={"enabled": False},
        )
        with open_worker(config, tmp_path) as worker:
            before = flat(weights_of(worker))
            for step in range(12):
                worker.train(make_batch(make_samples(seed=step % 3)), step)
            moved[bf16] = flat(weights_of(worker)) - before
    one_step = moved[True] / 12
    lost = (before.bfloat16() + one_step.bfloat16()) == before.bfloat16()
    assert float(lost.float().mean()) > 0.99
    assert float(moved[True].abs().max()) > 4e-5
    assert float((moved[True] - moved[False]).norm() / moved[False].norm()) < 0.1


@pytest.mark.parametrize(
    ("stored", "asked", "sent"), [("float32", "bfloat16", 2), ("bfloat16", "float32", 4), ("bfloat16", "auto", 2)]
)
def test_engines_get_their_data_type_and_exports_that_of_the_folder(tmp_path, stored, asked, sent):
    folder = make_model_folder(tmp_path / "model", dtype=getattr(torch, stored))
    config = make_config(folder, engine={"dtype": asked}, train={"bf16": True}, optimizer={"lr": 1e-2})
    with open_worker(config, tmp_path) as worker:
        worker.train(scored_batch(worker, make_samples()), 0)
        weights = weights_of(worker)
        assert {tensor.itemsize for tensor in weights.values()} == {sent}
        assert worker.expected_weights() == {name: tensor.nbytes for name, tensor in weights.items()}
        worker.save(str(tmp_path / "saved"))
        worker.export_hf(str(tmp_path / "saved"), str(tmp_path / "export"))
    exported = load_file(tmp_path / "export/model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {getattr(torch, stored)}
    narrow = {name: tensor.bfloat16().float() for name, tensor in exported.items()}
    assert largest_difference(narrow, {name: tensor.bfloat16().float() for name, tensor in weights.items()}) == 0


def test_master_weights_of_a_bf16_folder_are_saved_whole(tmp_path):
    folder = make_model_folder(tmp_path / "model", dtype=torch.bfloat16)
    with open_worker(make_config(folder, train={"bf16": True}, parity={"enabled": False}), tmp_path) as worker:
        worker.train(make_batch(make_samples()), 0)
        worker.save(str(tmp_path / "saved"))
    with SavedTrainer(tmp_path / "saved") as saved:
        weights = flat({name: saved.whole(name) for name in saved.shapes if name.startswith("model.")})
    assert float((weights == weights.bfloat16().float()).float().mean()) < 0.1
