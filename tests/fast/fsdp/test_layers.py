import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from miles.backends.fsdp_utils import model, roles
from miles.backends.fsdp_utils.warm_up import PACKS, warm_up
from miles.backends.training_utils.sequence_layout import _fastest
from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_model_folder,
    make_samples,
    open_worker,
    weights_of,
)


def trained(folder, tmp_path, **train):
    config = make_config(
        folder,
        train={"max_tokens_per_gpu": 64, **train},
        parity={"enabled": False},
        algorithm={"entropy_coef": 0.01},
    )
    with open_worker(config, tmp_path) as worker:
        metrics = [worker.train(make_batch(make_samples(8, seed=step)), step) for step in range(2)]
        scores = worker.score([s["tokens"] for s in make_samples(3)], 0.9)
        return metrics[-1]["train/grad_norm"], weights_of(worker), scores


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(model_folder, tmp_path, recompute):
    norm, weights, scores = trained(model_folder, tmp_path)
    again = trained(model_folder, tmp_path, recompute=recompute)
    assert again[0] == norm
    assert largest_difference(again[1], weights) == 0
    assert again[2] == scores


def test_attention_runs_once_where_it_is_kept_and_twice_where_all_is_recomputed(model_folder, tmp_path, monkeypatch):
    from miles.backends.fsdp_utils import packed_attention

    calls = []
    attend = packed_attention._attend
    monkeypatch.setattr(packed_attention, "_attend", lambda *args: calls.append(1) or attend(*args))
    counts = {}
    for recompute in ("none", "selective", "full"):
        config = make_config(model_folder, train={"recompute": recompute}, parity={"enabled": False})
        with open_worker(config, tmp_path) as worker:
            calls.clear()
            batch = make_batch(make_samples(2))
            worker.train(batch, 0)
            counts[recompute] = len(calls)
    assert counts["selective"] == counts["none"]
    assert counts["full"] == counts["none"] + 2


def test_small_layers_are_gathered_together_in_order():
    layers = [torch.nn.Linear(99, size, bias=False) for size in (10, 10, 10, 50, 5, 5)]
    for least, expected in ((1, [1] * 6), (1980, [2, 2, 2]), (2500, [3, 1, 2]), (10**6, [6])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "UNIT_PARAMETERS", least)
            units = model.gathered_together(layers)
        assert [layer for unit in units for layer in unit] == layers
        assert [len(unit) for unit in units] == expected


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_how_many_layers_are_gathered_together_changes_no_bit(tmp_path, monkeypatch, recompute):
    folder = make_model_folder(tmp_path / "model", num_hidden_layers=4)
    together = trained(folder, tmp_path, recompute=recompute)
    for least in (1, 30_000):
        monkeypatch.setattr(model, "UNIT_PARAMETERS", least)
        apart = trained(folder, tmp_path, recompute=recompute)
        assert apart[0] == together[0]
        assert apart[2] == together[2]
        assert largest_difference(apart[1], together[1]) == 0


def test_warming_up_leaves_no_trace(model_folder, tmp_path):
    config = make_config(
        model_folder,
        parity={"enabled": False},
        algorithm={"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    )
    found = []
    for warms in (False, True):
        with open_worker(config, tmp_path) as worker:
            if warms:
                before = weights_of(worker)
                warm_up(worker._roles)
                assert largest_difference(weights_of(worker), before) == 0
                assert all(parameter.grad is None for parameter in worker._roles.policy.parameters())
            metrics = worker.train(make_batch(make_samples(8)), 0)
            found.append((metrics["train/loss"], metrics["train/grad_norm"], weights_of(worker)))
    assert found[0][:2] == found[1][:2]
    assert largest_difference(found[0][2], found[1][2]) == 0


def test_warming_up_goes_both_ways_that_attention_takes_on_a_gpu():
    assert [borders < rows for _, rows, borders in map(_fastest, PACKS)] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_after_warming_up_no_batch_compiles_anything(tmp_path, monkeypatch, recompute, alone):
    monkeypatch.setattr(roles, "keeps_gathered", lambda config: alone)
    folder = make_model_folder(tmp_path / "model", num_hidden_layers=3)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    train = {"max_tokens_per_gpu": 64, "compile_layers": True, "recompute": recompute}
    config = make_config(folder, train=train, parity={"enabled": False}, algorithm={"use_kl_loss": True})
    with open_worker(config, tmp_path) as worker:
        worker.warm_up()
        assert counters["stats"]["unique_graphs"] > 0
        counters.clear()
        for step in range(2):
            worker.train(make_batch(make_samples(8, seed=step)), step)
        worker.score([s["tokens"] for s in make_samples(3)], 0.9)
        assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
def test_compiled_layers_compute_the_same_in_one_form_for_all_layers_and_lengths(tmp_path, monkeypatch):
    folder = make_model_folder(tmp_path / "model", num_hidden_layers=4)
    norm, weights, scores = trained(folder, tmp_path)
    # Without the backend that writes and compiles C++, which this test is not about.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for recompute in ("none", "selective"):
        torch._dynamo.reset()
        counters.clear()
        found = trained(folder, tmp_path, compile_layers=True, recompute=recompute)
        assert found[0] == pytest.approx(norm, rel=1e-4)
        assert largest_difference(found[1], weights) < 1e-4
        for ours, theirs in zip(found[2], scores, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        # What is before attention and what is after it; with gradient and without.
        assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.slow
def test_gradients_go_from_attention_to_compiled_layers_without_a_copy(tmp_path, monkeypatch):
    folder = make_model_folder(tmp_path / "model")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    config = make_config(folder, train={"max_tokens_per_gpu": 64, "compile_layers": True}, parity={"enabled": False})
    with open_worker(config, tmp_path) as worker:
        worker.train(make_batch(make_samples(4)), 0)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            worker.train(make_batch(make_samples(4)), 1)
    below = [event for event in profiler.events() if event.cpu_parent is not None]
    names = {event.name for event in below if event.cpu_parent.name == "CompiledFunctionBackward"}
    assert "aten::mm" in names
    assert not names & {"aten::contiguous", "aten::copy_"}
