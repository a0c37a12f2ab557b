from pathlib import Path

import pytest

from miles.core.plugins import HOOKS, check_signature
from miles.errors import HookError
from tests.fast.fsdp import reducer_hooks
from tests.fast.fsdp.support import largest_difference, make_samples, make_split_samples
from tests.fast.fsdp.test_losses import train

PATH = "custom_pg_loss_reducer_function_path"
PAIRS = {
    "constant": {"loss_denominator": "constant", "loss_constant": 20},
    "token_sum": {"calculate_per_token_loss": True},
    "sample_mean": {"loss_denominator": "trajectories"},
}
"""Function -> the settings whose sums it makes, when every sample is a trajectory."""


def algorithm(name, **more):
    per_token = {"calculate_per_token_loss": True} if name == "token_sum" else {}
    return {PATH: f"{reducer_hooks.__name__}.{name}", **per_token, **more}


@pytest.mark.parametrize("name", PAIRS)
def test_a_reducer_that_makes_a_denominators_sum_trains_like_it_however_the_step_is_split(
    model_folder, tmp_path, name
):
    samples = make_samples()
    expected, weights = train(model_folder, tmp_path, samples, algorithm=dict(PAIRS[name]))
    for tokens in (4096, 20):
        found, others = train(
            model_folder, tmp_path, samples, algorithm=algorithm(name), train={"max_tokens_per_gpu": tokens}
        )
        assert found["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], abs=1e-6)
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
        assert largest_difference(weights, others) <= 1e-6
    assert expected["train/grad_norm"] > 1e-3


def test_a_trajectory_of_several_samples_counts_once_in_what_the_sum_is_divided_by(model_folder, tmp_path):
    samples = make_split_samples()
    expected, weights = train(model_folder, tmp_path, samples, algorithm=dict(PAIRS["constant"]))
    for tokens in (4096, 14):
        found, others = train(
            model_folder, tmp_path, samples, algorithm=algorithm("constant"), train={"max_tokens_per_gpu": tokens}
        )
        assert found["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], abs=1e-6)
        assert largest_difference(weights, others) <= 1e-6


def test_entropy_and_kl_keep_the_runs_denominator(model_folder, tmp_path):
    more = {"entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": 0.3}
    expected, _ = train(model_folder, tmp_path, make_samples(), algorithm={**PAIRS["sample_mean"], **more})
    found, _ = train(model_folder, tmp_path, make_samples(), algorithm=algorithm("constant", **more))
    for name in ("entropy_loss", "kl_loss"):
        assert found[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], abs=1e-6)
    assert found["train/pg_loss"] != pytest.approx(expected["train/pg_loss"], abs=1e-4)


def test_rejected_tokens_are_masked_for_the_reducer_and_not_counted(model_folder, tmp_path):
    correction = {"preset": "rejection", "rejection_level": "sequence", "rejection_upper": 1.5}
    expected, weights = train(
        model_folder, tmp_path, make_samples(), algorithm=dict(PAIRS["sample_mean"]), correction=dict(correction)
    )
    found, others = train(
        model_folder, tmp_path, make_samples(), algorithm=algorithm("sample_mean"), correction=dict(correction)
    )
    assert 0 < expected["train/mis_trajectories_rejected"] < 1
    assert found["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], abs=1e-6)
    assert largest_difference(weights, others) <= 1e-6


def test_the_example_of_the_documentation_is_the_denominator_that_it_says(model_folder, tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    code = page[page.index("### Your own sum") :].split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "reducer_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    same = {"loss_denominator": "constant", "loss_constant": 1000}
    expected, weights = train(model_folder, tmp_path, make_samples(), algorithm=same)
    found, others = train(model_folder, tmp_path, make_samples(), algorithm={PATH: "reducer_of_the_page.reducer"})
    assert found["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], abs=1e-7)
    assert largest_difference(weights, others) <= 1e-6


@pytest.mark.parametrize("name", ["no_function", "no_number", "no_gradient", "breaks"])
def test_a_reducer_that_fails_or_returns_something_else_is_named(model_folder, tmp_path, name):
    with pytest.raises(HookError, match="custom-pg-loss-reducer-function-path"):
        train(model_folder, tmp_path, make_samples(), algorithm=algorithm(name))


def test_the_signature_of_a_reducer_is_checked_at_start():
    contract = HOOKS["--custom-pg-loss-reducer-function-path"]
    check_signature(reducer_hooks.constant, contract)
    with pytest.raises(HookError):
        check_signature(lambda loss_masks: None, contract)
