import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from miles.backends.fsdp_utils.hf_folder import stored_tensors
from miles.config.load import load
from miles.doctor.main import compare, facts_of, main, summary, table
from miles.doctor.model import choose_model
from miles.doctor.options import MAX_PARAMETERS, read_options
from miles.doctor.ranks import budget_of, differences, examined, facts, late
from miles.doctor.samples import STEPS, TRAJECTORIES, engine_log_probs, make_batch, make_trajectories
from miles.doctor.variations import BASE, LEAST, VARIATIONS, Variation
from miles.errors import ConfigError, MilesError
from tests.fast.fsdp.moe import make_moe_folder
from tests.fast.fsdp.support import make_model_folder

REWARD = ["--rm-type", "exact", "--label-key", "label"]
RUN = ["--num-rollout", "2", "--rollout-batch-size", "4", *REWARD, "--n-samples-per-prompt", "4"]
SFT = [
    *RUN[:4],
    "--rollout-function-path",
    "miles.rollout.sft_rollout.generate_rollout",
    "--n-samples-per-prompt",
    "1",
]
NORM = 2.0


def batch_of(config, *, split_all=False, shuffled=False, seed=0):
    made = make_trajectories(50, per_group=config.rollout.n_samples_per_prompt, seed=seed)
    scores = [np.linspace(-3, -1, len(t.tokens) - 1).tolist() for t in made]
    log_probs = engine_log_probs(scores, seed=seed)
    return make_batch(config, made, log_probs, split_all=split_all, shuffled=shuffled, seed=seed)


def trained_tokens(batch):
    """What is trained on: trajectory, place within it, token, engine's log-prob, reward."""
    found = set()
    for b in range(len(batch)):
        tokens, mask = batch["tokens"].row(b), batch["loss_mask"].row(b)
        start = len(tokens) - len(mask)
        found |= {
            (
                int(batch["trajectory"].row(b)[0]),
                start + r,
                int(tokens[start + r]),
                float(batch["rollout_log_probs"].row(b)[r]),
                float(batch["reward"].row(b)[0]),
            )
            for r in np.flatnonzero(mask)
        }
    return found


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_batch_is_ragged_with_masked_middles_an_untrained_trajectory_and_one_in_two_samples(n):
    config = load([*RUN[:-1], str(n)])
    batch = batch_of(config)
    masks = list(batch["loss_mask"].rows())
    trajectory_B = np.asarray(batch["trajectory"].values)
    sizes = np.bincount(trajectory_B)
    assert len(set(batch.total_lengths.tolist())) > 5
    assert sum(not mask.any() for mask in masks) == 1
    assert sum((np.diff(mask) != 0).sum() == 2 for mask in masks) >= TRAJECTORIES - 3
    assert len(sizes) >= TRAJECTORIES
    assert sorted(sizes)[-2:] == [1, 2]
    half = late(np.asarray(batch["group_index"].values))
    assert len(set(trajectory_B[half])) == len(set(trajectory_B[~half])) == len(sizes) // STEPS


def test_splitting_and_shuffling_leave_what_is_trained_on():
    config = load(RUN)
    whole = batch_of(config)
    split = batch_of(config, split_all=True)
    shuffled = batch_of(config, split_all=True, shuffled=True)
    assert len(split) == 2 * TRAJECTORIES > len(whole)
    assert trained_tokens(whole) == trained_tokens(split) == trained_tokens(shuffled)
    assert batch_of(config, seed=1)["tokens"].row(0).tolist() != whole["tokens"].row(0).tolist()
    order = np.asarray(shuffled["sample_index"].values)
    assert sorted(order) == sorted(split["sample_index"].values)
    assert list(order) != list(split["sample_index"].values)
    for number in range(TRAJECTORIES):
        first, second = order.tolist().index(2 * number), order.tolist().index(2 * number + 1)
        assert first < second, "the turns of a trajectory have an order of their own"
    groups = np.asarray(shuffled["group_index"].values)
    assert set(groups[:TRAJECTORIES]) & set(groups[TRAJECTORIES:]) == set()


def test_supervised_batches_have_neither_rewards_nor_log_probs():
    batch = batch_of(load([*SFT, "--loss-type", "sft_loss"]))
    assert {name for name, _ in batch.all_columns()} & {"reward", "rollout_log_probs"} == set()


def test_budgets_cut_each_optimizer_step_into_at_least_as_many_micro_batches():
    batch = batch_of(load(RUN))
    half = late(np.asarray(batch["group_index"].values))
    for parts in (2, 4):
        budget = budget_of(batch, Variation(name="", parts=parts))
        assert all(-(-batch.total_lengths[part].sum() // budget) >= parts for part in (half, ~half))
    assert budget_of(batch, Variation(name="", parts=LEAST)) == batch.total_lengths.max()
    assert budget_of(batch, BASE) == batch.total_lengths.sum()


def test_variations_cover_ranks_micro_batches_order_and_splitting():
    assert {v.ranks for v in (BASE, *VARIATIONS)} == {1, 2, 4}
    assert len({v.name for v in VARIATIONS}) == len(VARIATIONS)
    alone = [v for v in VARIATIONS if v.ranks == 1]
    changes = [(v.parts > 1, v.shuffled, v.split == "all") for v in alone]
    assert {(True, False, False), (False, True, False), (False, False, True)} <= set(changes)


def test_a_difference_is_told_along_the_gradient_and_across_it():
    base = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    assert differences(base, 1.5 * base) == pytest.approx({"gradient": 0.5, "direction": 0.0})
    across = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert differences(base, base + across) == pytest.approx({"gradient": 0.0, "direction": 0.2})


def test_the_examined_run_has_the_recipes_loss_and_an_optimizer_that_shows_gradients(tmp_path):
    flags = ["--advantage-estimator", "dapo", "--use-tis", "--rollout-temperature", "0.7", "--lr", "1", "--ci-test"]
    config = load([*RUN, *flags])
    changed = examined(config, str(tmp_path), None)
    assert (changed.algorithm, changed.correction, changed.rollout) == (
        config.algorithm,
        config.correction,
        config.rollout,
    )
    assert changed.optimizer.clip_grad == 0
    assert not changed.ci.test
    assert not changed.parity.enabled
    assert changed.train.num_steps_per_rollout == STEPS


def test_a_large_or_missing_model_is_replaced_by_a_tiny_one_of_its_family(tmp_path):
    folder = make_model_folder(tmp_path / "own")
    own = choose_model(str(folder), "ref", max_parameters=MAX_PARAMETERS, work=tmp_path / "a", seed=0)
    assert (own.folder, own.reference) == (str(folder), "ref")
    assert not (tmp_path / "a").exists()
    tiny = choose_model(str(folder), "ref", max_parameters=100, work=tmp_path / "b", seed=0)
    assert "a tiny qwen3 made here" in tiny.about
    assert "more than --max-parameters 100" in tiny.about
    none = choose_model("", None, max_parameters=100, work=tmp_path / "c", seed=0)
    assert "no --hf-checkpoint is given" in none.about
    assert none.reference is not None
    weights = [(tmp_path / "c" / name / "model.safetensors").read_bytes() for name in ("policy", "reference")]
    assert weights[0] != weights[1]
    config = json.loads((tmp_path / "b" / "policy" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("qwen3", True)


def test_the_tiny_model_of_a_family_with_experts_has_few_and_small_ones(tmp_path):
    folder = make_moe_folder(tmp_path / "own")
    assert "num_experts" not in json.loads(
        (folder / "config.json").read_text()
    )  # transformers writes num_local_experts
    tiny = choose_model(str(folder), None, max_parameters=100, work=tmp_path / "made", seed=0)
    assert stored_tensors(tiny.folder, tied=False)["model.layers.0.mlp.gate.weight"].shape == (4, 64)


def found(config, denominator: str = "trajectories", **changes: Any):
    """What ranks may have found: the whole, and one variation that is equal but for `changes`."""
    batch = batch_of(config)
    numbers = {"train/loss": 0.5, "train/trainable_tokens": 200.0, "train/skipped_steps": 0.0, "train/grad_norm": NORM}
    place = {"ranks": 1, "max_tokens": 100}
    base = {"name": BASE.name, **place, "metrics": numbers, "gradient_norm": NORM, "splits": False}
    base["facts"] = facts(config, batch) | {"denominator": denominator}
    metrics = numbers | {name: value for name, value in changes.items() if name in numbers}
    other = {"name": "other", **place, "metrics": metrics, "gradient": 1e-9, "direction": 1e-7, "splits": False}
    return [base, other | {name: value for name, value in changes.items() if name not in numbers}]


@pytest.mark.parametrize(
    ("changes", "verdict", "why"),
    [
        ({}, "OK", None),
        ({"train/loss": 0.5 + 3e-6}, "DIFFERS", "loss 0.500003 instead of 0.5"),
        ({"train/loss": float("nan")}, "DIFFERS", "loss nan"),
        ({"gradient": 2e-6}, "DIFFERS", "size is another by 2.0e-06"),
        ({"gradient": float("nan")}, "DIFFERS", "size is another by nan"),
        ({"direction": 2e-5}, "DIFFERS", "points elsewhere by 2.0e-05"),
        ({"train/trainable_tokens": 199.0}, "DIFFERS", "199 trainable tokens instead of 200"),
    ],
)
def test_a_row_is_ok_only_within_every_bound(changes, verdict, why):
    (row,) = compare(load(RUN), found(load(RUN), **changes))
    assert row.verdict == verdict
    assert row.fails == (verdict == "DIFFERS")
    assert (row.why is None) if why is None else (why in row.why)
    assert row.name in table([row])


def test_bf16_has_wider_bounds():
    config = load([*RUN, "--bf16"])
    changes: dict[str, Any] = {"gradient": 1e-3, "direction": 2e-2, "train/loss": 0.501}
    assert compare(config, found(config, **changes))[0].verdict == "OK"
    wider: dict[str, Any] = {**changes, "gradient": 3e-3}
    assert compare(config, found(config, **wider))[0].fails


def test_a_denominator_that_counts_samples_is_not_blamed_for_split_trajectories():
    config = load([*RUN, "--loss-denominator", "sequences"])
    (row,) = compare(config, found(config, denominator="sequences", splits=True, gradient=0.3))
    assert row.verdict == "by definition"
    assert "weighs each sample alike" in table([row])
    assert compare(config, found(config, denominator="sequences", gradient=0.3))[0].fails


@pytest.mark.parametrize("norm", [0.0, float("nan")])
def test_without_a_gradient_there_is_no_proof(norm):
    rows = found(load(RUN))
    rows[0]["gradient_norm"] = norm
    with pytest.raises(MilesError, match="nothing to compare"):
        compare(load(RUN), rows)


def test_effective_learning_rate_and_shares_are_those_of_the_configuration():
    config = load([*RUN, "--lr", "0.1", "--clip-grad", "1", "--calculate-per-token-loss"])
    rows = found(config, denominator="tokens")
    rows[0]["metrics"]["train/pg_clipfrac"] = 0.25
    told = facts_of(config, rows[0])
    batch = batch_of(config)
    half = late(np.asarray(batch["group_index"].values))
    mask = [np.count_nonzero(m) for m in batch["loss_mask"].rows()]
    per_step = [sum(m for m, h in zip(mask, half, strict=True) if h == side) for side in (False, True)]
    assert told["clip_scale"] == 0.5
    assert told["effective_lr"]["max"] == pytest.approx(0.1 * 0.5 / min(per_step))
    assert told["effective_lr"]["mean"] == pytest.approx(0.1 * 0.5 * STEPS / sum(per_step))
    assert told["share_trainable"] == pytest.approx(sum(mask) / batch.total_lengths.sum())
    assert told["share_with_gradient"] == pytest.approx(200 * 0.75 / batch.total_lengths.sum())
    assert told["tokens_per_step"] == sum(per_step) / 2
    assert "effective learning rate" in summary(told)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--doctor-seed", "-1"], "negative"),
        (["--doctor-seed", "x"], "got x"),
        (["--timeout", "0"], "leave no time"),
        (["--json", "no/such/folder.json"], "no such folder"),
        (["--hf-checkpoint", "nowhere"], "nowhere: no such folder"),
        (["--eps-clip", "-1"], "--eps-clip: got"),
        (["--eps-clipp", "1"], "--eps-clipp"),
    ],
)
def test_a_wrong_flag_ends_with_status_2_and_names_it(flags, message, capsys):
    assert main(["loss", *RUN, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_needs_neither_prompts_nor_evaluation_data(tmp_path):
    examination = read_options([*RUN, "--eval-interval", "2", "--json", str(tmp_path / "x.json"), "--lr", "0.5"])
    assert examination.config.optimizer.lr == 0.5
    assert examination.json_path == tmp_path / "x.json"
    with pytest.raises(ConfigError, match="temperature"):
        read_options([*RUN, "--eval-temperature", "-2"])


def test_help_and_mistakes_answer_without_loading_torch_or_ray(tmp_path):
    code = (
        "import sys; from miles.doctor.main import main\n"
        "print(main(sys.argv[1:]), sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    recipe = str(tmp_path / "no.yaml")
    cases = ((["--help"], "0", "--doctor-seed"), (["loss", recipe], "2", "no such file"), (["lose"], "2", "'lose'"))
    for argv, status, words in cases:
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == f"{status} []", done.stderr
        assert words in done.stdout + done.stderr
