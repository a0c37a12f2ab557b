import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from miles.backends.fsdp_utils.critic import CRITIC, VALUE_HEAD, critic_tensors, load_critic
from miles.backends.fsdp_utils.planned_batch import balance_cost
from miles.backends.training_utils.packing import FlatBatch
from miles.errors import CheckpointError, HookError, TrainingError
from tests.fast.fsdp.ranks import play_all
from tests.fast.fsdp.support import (
    VOCAB,
    largest_difference,
    make_batch,
    make_config,
    make_model_folder,
    make_samples,
    open_worker,
    scored_batch,
    weights_of,
)

PPO = {"advantage_estimator": "ppo", "lambd": 0.9}
OFF = {"enabled": False}


def ppo_config(folder, **sections):
    sections.setdefault("algorithm", dict(PPO))
    sections.setdefault("train", {"global_batch_size": 4})
    return make_config(folder, **sections)


def critic_of(worker):
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in worker._roles.critic.tensors().items()
    }


def test_a_language_models_folder_gives_its_decoder_and_values_of_zero(tmp_path):
    for tied in (True, False):
        folder = make_model_folder(tmp_path / str(tied), tied=tied)
        model, stored = load_critic(folder)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            kept = {name for name in file.keys() if name != "lm_head.weight"}  # noqa: SIM118
            assert {*kept, VALUE_HEAD} == set(stored) == set(critic_tensors(model))
            assert all(torch.equal(critic_tensors(model)[name], file.get_tensor(name)) for name in kept)
        packed = FlatBatch.from_sequences([[1, 2, 3, 4], [5, 6]])
        assert model(packed.micro_batch(np.arange(2))).tolist() == [0, 0, 0, 0]


def test_a_value_depends_on_what_came_before_the_token_and_on_nothing_else(model_folder):
    model, _ = load_critic(model_folder)
    torch.nn.init.normal_(model.value_head)

    def values(*sequences):
        packed = FlatBatch.from_sequences(list(sequences))
        part = packed.micro_batch(np.arange(len(sequences)))
        return torch.zeros(len(packed.mask_R)).index_put((part.entries_N,), model(part))

    with torch.no_grad():
        one = values([1, 2, 3, 4, 5])
        hidden = Qwen3ForCausalLM.from_pretrained(model_folder).model(torch.tensor([[1, 2, 3, 4]])).last_hidden_state
        torch.testing.assert_close(one, hidden[0] @ model.value_head[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values([1, 2, 3, 9, 9])[:3], one[:3])
        torch.testing.assert_close(values([7, 8, 9], [1, 2, 3, 4, 5])[2:], one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", ["lacks a tensor", "has another", "other shape"])
def test_a_folder_that_is_no_critic_is_refused(tmp_path, wrong):
    folder = make_model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    change = {
        "lacks a tensor": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        "has another": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "other shape": {"intermediate_size": 40},
    }[wrong]
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=r"not those of a critic.*\n    fix: give --critic-load"):
        load_critic(folder)


def test_two_optimizer_steps_equal_a_plain_training_loop(model_folder, tmp_path):
    samples = make_samples(8)
    config = ppo_config(
        model_folder,
        optimizer={"lr": 1.0, "adam_eps": 1.0, "weight_decay": 0.1, "clip_grad": 0.5},
        critic={"lr": 0.5, "value_clip": 0.02},
        train={"global_batch_size": 4, "max_tokens_per_gpu": 24},
    )
    with open_worker(config, tmp_path) as worker:
        with torch.no_grad():
            head = worker._roles.critic._model.value_head
            head.to_local().copy_(torch.linspace(-0.1, 0.1, head.numel())[None])
        metrics = worker.train(scored_batch(worker, samples), 0)
        ours = critic_of(worker)

    model = Qwen3ForCausalLM.from_pretrained(model_folder).model
    head = torch.linspace(-0.1, 0.1, 32)[None].requires_grad_(True)
    parameters = [*model.parameters(), head]
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == d], "weight_decay": 0.1 * d} for d in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=0.5, betas=(0.9, 0.95), eps=1.0)

    def values(s):
        n = len(s["loss_mask"])
        return (model(torch.tensor([s["tokens"][:-1]])).last_hidden_state[0] @ head[0])[-n:]

    olds, returns = [], []
    for s in samples:
        with torch.no_grad():
            old = values(s)
        steps = [t for t, m in enumerate(s["loss_mask"]) if m]
        target, advantage, after = old.clone(), 0.0, 0.0
        for t in reversed(steps):
            earned = s["reward"] if t == steps[-1] else 0.0
            advantage = earned + after - float(old[t]) + 0.9 * advantage
            after = float(old[t])
            target[t] = advantage + after
        olds.append(old)
        returns.append(target)
    losses, norms = [], []
    for part in (range(4), range(4, 8)):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for b in part:
            now, mask = values(samples[b]), torch.tensor(samples[b]["loss_mask"])
            bounded = torch.minimum(torch.maximum(now, olds[b] - 0.02), olds[b] + 0.02)
            term = torch.maximum((now - returns[b]) ** 2, (bounded - returns[b]) ** 2)
            loss = loss + (term * mask).sum() / mask.sum() / 4
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        optimizer.step()

    theirs = {f"{CRITIC}model.{n}": p.detach() for n, p in model.named_parameters()}
    theirs[f"{CRITIC}{VALUE_HEAD}"] = head.detach()
    assert largest_difference({n: t for n, t in ours.items() if "exp_avg" not in n}, theirs) < 2e-6
    assert metrics["train/value_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["train/critic_grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics["train/critic_lr"] == 0.5
    assert metrics["train/lr"] == 1.0
    assert metrics["train/value_clipfrac"] > 0


def test_ranks_are_balanced_by_what_policy_and_critic_cost_together(model_folder, tmp_path):
    larger = make_model_folder(tmp_path / "larger", num_hidden_layers=4)
    lengths = np.array([3, 50])
    costs = {}
    for name, critic in (("none", None), ("same", model_folder), ("larger", larger)):
        algorithm = {"algorithm": {}} if critic is None else {"critic": {"load": str(critic)}}
        config = ppo_config(model_folder, **algorithm, train={"balance_by_flops": True})
        with open_worker(config, tmp_path) as worker:
            costs[name] = balance_cost(worker._config, worker._roles, lengths)
    head = 2 * VOCAB * 32 * lengths  # a critic has a value where the policy has its vocabulary
    value = 2 * 32 * lengths
    np.testing.assert_allclose(costs["same"], 2 * costs["none"] - head + value)
    decoder = costs["none"] - head
    np.testing.assert_allclose(costs["larger"], costs["none"] + 2 * decoder + value)


def test_the_value_loss_falls_and_values_come_to_explain_returns(model_folder, tmp_path):
    config = ppo_config(model_folder, critic={"value_clip": 5.0, "num_only_steps": 20})
    with open_worker(config, tmp_path) as worker:
        batch = scored_batch(worker, make_samples())
        found = [worker.train(batch, step) for step in range(12)]
    assert found[0]["train/explained_variance"] == 0
    assert found[-1]["train/explained_variance"] > 0.8
    assert found[-1]["train/value_loss"] < 0.2 * found[0]["train/value_loss"]


def test_the_first_steps_train_the_critic_alone_and_the_policys_schedule_begins_after_them(model_folder, tmp_path):
    optimizer = {"lr": 1e-2, "lr_warmup_iters": 2, "lr_decay_style": "linear", "min_lr": 2e-3}
    critic = {"num_only_steps": 2, "lr": 2e-2}
    config = ppo_config(model_folder, optimizer=optimizer, critic=critic)
    with open_worker(config, tmp_path, total_steps=10) as worker:
        start = weights_of(worker)
        found = []
        for step in range(5):
            before = critic_of(worker)
            found.append(worker.train(scored_batch(worker, make_samples(seed=step)), step))
            assert largest_difference(before, critic_of(worker)) > 1e-4
            assert (largest_difference(start, weights_of(worker)) == 0) == (step < 2)
    assert [m["train/optimizer_steps"] for m in found] == [0, 0, 2, 4, 6]
    for only in found[:2]:  # so a publish does not expect other weights
        assert not {"train/lr", "train/grad_norm", "train/loss"} & only.keys()
        assert only["train/value_loss"] > 0
    lrs = [m["train/lr"] for m in found[2:]]
    assert lrs == pytest.approx([1e-2, 1e-2 - 0.25 * 8e-3, 1e-2 - 0.75 * 8e-3])
    assert [m["train/critic_lr"] for m in found] == pytest.approx([2e-2 - f / 10 * 1.6e-2 for f in (1, 3, 5, 7, 9)])


GRADIENT_AS_MOMENT = {"lr": 0.1, "adam_eps": 1.0, "adam_beta1": 0.0, "clip_grad": 0.2}
SPLITS = [(1, 8192), (1, 14), (2, 8192), (2, 30)]


@pytest.fixture(scope="module")
def played(model_folder, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("critic-ranks")
    settings = {"optimizer": GRADIENT_AS_MOMENT, "algorithm": PPO, "parity": OFF, "critic": {"value_clip": 0.05}}
    cases = [
        {"name": f"{ranks}x{tokens}", "ranks": ranks, "story": "trains"}
        | {"settings": {**settings, "train": {"max_tokens_per_gpu": tokens}}}
        for ranks, tokens in SPLITS
    ]
    cases += [{"name": "resumes", "ranks": 2, "story": "resumes", "settings": {"algorithm": PPO, "parity": OFF}}]
    return play_all(tmp, [{**case, "model": str(model_folder)} for case in cases])


def tensors_of(folder):
    with SavedTrainer(folder) as saved:
        return {name: saved.whole(name) for name in saved.shapes}


@pytest.mark.parametrize(("ranks", "tokens"), SPLITS[1:])
def test_ranks_and_micro_batches_change_neither_value_loss_nor_gradients(played, ranks, tokens):
    one, other = played / "1x8192", played / f"{ranks}x{tokens}"
    for step in ("idle", "uneven"):
        expected, found = tensors_of(one / step), tensors_of(other / step)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert float((tensor - found[name]).norm()) <= 2e-6 * float(tensor.norm()), (step, name)
        records = [
            json.loads((folder / f"{step}-rank{rank}.json").read_text())
            for folder, count in ((one, 1), (other, ranks))
            for rank in range(count)
        ]
        for record in records:
            assert record == pytest.approx(records[0], rel=5e-6, abs=1e-6)
    moments = {n: t for n, t in tensors_of(one / "uneven").items() if n.startswith(f"{CRITIC}exp_avg.")}
    assert all(float(t.abs().max()) > 1e-6 for t in moments.values())


def test_two_ranks_resume_in_the_same_bits(played):
    whole, again = tensors_of(played / "resumes" / "third"), tensors_of(played / "resumes" / "third-again")
    assert f"{CRITIC}exp_avg_sq.{VALUE_HEAD}" in whole
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_resumed_run_ends_in_the_same_bits(model_folder, tmp_path):
    optimizer = {"lr": 1e-2, "lr_decay_style": "cosine"}
    config = ppo_config(model_folder, optimizer=optimizer, critic={"num_only_steps": 1, "lr_warmup_iters": 3})
    batches = [make_batch(make_samples(seed=step)) for step in range(3)]
    config = config.model_copy(update={"parity": config.parity.model_copy(update={"enabled": False})})
    with open_worker(config, tmp_path) as worker:
        for step in (0, 1):
            worker.train(batches[step], step)
        worker.save(str(tmp_path / "saved"))
        whole = worker.train(batches[2], 2)
        expected = {**weights_of(worker), **critic_of(worker)}
    with open_worker(config, tmp_path) as worker:
        worker.load(str(tmp_path / "saved"))
        resumed = worker.train(batches[2], 2)
        assert largest_difference(expected, {**weights_of(worker), **critic_of(worker)}) == 0
    kept = [{k: v for k, v in m.items() if k.startswith("train/")} for m in (whole, resumed)]
    assert kept[0] == kept[1]


def test_a_checkpoint_with_a_critic_and_a_run_without_one_do_not_go_together(model_folder, tmp_path):
    with_critic, without = ppo_config(model_folder), make_config(model_folder)
    for config, name in ((with_critic, "with"), (without, "without")):
        with open_worker(config, tmp_path) as worker:
            worker.save(str(tmp_path / name))
    no_critic = r"saved without a critic(.|\n)*fix: .*--hf-checkpoint CHECKPOINT/hf"
    with open_worker(with_critic, tmp_path) as worker, pytest.raises(CheckpointError, match=no_critic):
        worker.load(str(tmp_path / "without"))
    a_critic = "saved with a critic, and this run trains none\n    fix: --advantage"
    with open_worker(without, tmp_path) as worker, pytest.raises(CheckpointError, match=a_critic):
        worker.load(str(tmp_path / "with"))


def test_an_exported_critic_is_loaded_again_and_replaced_by_the_next(model_folder, tmp_path):
    target = tmp_path / "critic"
    config = ppo_config(model_folder, critic={"save": str(target)})
    with open_worker(config, tmp_path) as worker:
        for step in (0, 1):
            worker.train(scored_batch(worker, make_samples(seed=step)), step)
            worker.save(str(tmp_path / f"saved{step}"))
            worker.export_hf(str(tmp_path / f"saved{step}"), str(tmp_path / f"hf{step}"))
        expected = critic_of(worker)
    other = ppo_config(model_folder, critic={"load": str(target)})
    with open_worker(other, tmp_path) as worker:
        found = critic_of(worker)
        weights = [n for n in expected if "exp_avg" not in n]
        assert all(torch.equal(found[n], expected[n]) for n in weights)
        assert float(found[f"{CRITIC}{VALUE_HEAD}"].abs().max()) > 0
    assert sorted(p.name for p in tmp_path.iterdir() if "critic" in p.name) == ["critic"]


def test_a_folder_with_something_else_is_not_replaced_by_a_critic(model_folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with open_worker(ppo_config(model_folder, critic={"save": str(tmp_path / "mine")}), tmp_path) as worker:
        worker.save(str(tmp_path / "saved"))
        with pytest.raises(CheckpointError, match="mine: holds something else than a critic"):
            worker.export_hf(str(tmp_path / "saved"), str(tmp_path / "hf"))
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_critic_of_another_vocabulary_is_refused(model_folder, tmp_path):
    other = make_model_folder(tmp_path / "other")
    model = Qwen3ForCausalLM.from_pretrained(other)
    model.resize_token_embeddings(30)
    model.save_pretrained(other)
    opening = open_worker(ppo_config(model_folder, critic={"load": str(other)}), tmp_path)
    with pytest.raises(CheckpointError, match="the critic has 30 token ids, the policy 24"):
        opening.__enter__()
    torch.distributed.destroy_process_group()


def test_values_that_are_no_numbers_name_their_samples(model_folder, tmp_path):
    with open_worker(ppo_config(model_folder), tmp_path) as worker:
        batch = scored_batch(worker, make_samples())
        before = weights_of(worker)
        with torch.no_grad():
            worker._roles.critic._model.value_head.to_local().fill_(float("nan"))
        with pytest.raises(TrainingError, match=r"the critic's value is nan .* in samples 500"):
            worker.train(batch, 0)
        assert largest_difference(before, weights_of(worker)) == 0


def test_skipped_steps_of_the_critic_are_counted_and_bounded(model_folder, tmp_path):
    config = ppo_config(model_folder, train={"global_batch_size": 4, "max_skipped_steps": 2})
    samples = [{**s, "reward": 1e30} for s in make_samples()]
    with open_worker(config, tmp_path) as worker:
        batch = scored_batch(worker, samples)
        before = critic_of(worker)
        metrics = worker.train(batch, 0)
        found = r"step 1: the critic's loss or gradient is not finite \(gradient norm inf\), and 3 optimizer steps in a row were skipped(.|\n)*lower --critic-lr"
        with pytest.raises(TrainingError, match=found):
            worker.train(batch, 1)
        assert metrics["train/critic_skipped_steps"] == 2
        assert largest_difference(before, critic_of(worker)) == 0


def without_returns(args, rollout_data):
    rollout_data["advantages"] = [v + 1 for v in rollout_data["values"]]


def with_returns(args, rollout_data):
    rollout_data["advantages"] = [v + 1 for v in rollout_data["values"]]
    rollout_data["returns"] = [v + 2 for v in rollout_data["values"]]


def test_a_users_advantages_get_values_and_must_set_returns(model_folder, tmp_path):
    for name in ("with_returns", "without_returns"):
        algorithm = {**PPO, "custom_advantage_function_path": f"{__name__}.{name}"}
        with open_worker(ppo_config(model_folder, algorithm=algorithm), tmp_path) as worker:
            batch = scored_batch(worker, make_samples())
            if name == "with_returns":
                assert worker.train(batch, 0)["train/value_loss"] == pytest.approx(4, abs=0.5)
            else:
                with pytest.raises(HookError, match="did not set rollout_data\\['returns'\\]"):
                    worker.train(batch, 0)


def test_a_critic_computes_in_bf16_over_fp32_masters(model_folder, tmp_path):
    config = ppo_config(
        model_folder, train={"bf16": True, "global_batch_size": 4}, critic={"value_clip": 5.0}, parity=dict(OFF)
    )
    with open_worker(config, tmp_path) as worker:
        found = [worker.train(make_batch(make_samples()), step) for step in range(6)]
        assert all(t.dtype == torch.float32 for t in critic_of(worker).values())
    assert found[-1]["train/value_loss"] < 0.5 * found[0]["train/value_loss"]
