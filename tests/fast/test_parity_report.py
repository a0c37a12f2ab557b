import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.schema import RunConfig
from miles.errors import ConfigError
from miles.parity.engines import Sampled, prompts_of
from miles.parity.main import main, verdict
from miles.parity.options import read_options
from miles.parity.report import BETWEEN, DECODE, FIRST, PREFILL, Pair, pair_of, table
from miles.parity.statistics import difference, recommended
from miles.parity.trainer import Scored
from tests.fast.rollout.support import write_rows
from tests.fast.torch_engine.support import LETTERS, make_model

SFT = ["--loss-type", "sft_loss", "--rollout-function-path", "miles.rollout.sft_rollout.generate_rollout"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


# ---- the numbers


def test_differences_are_those_of_the_definitions():
    sampled = np.log([0.5, 0.5, 0.5, 0.5])
    scored = np.log([0.5, 0.55, 0.39, 0.61])
    found = difference(scored, sampled)
    distance = np.abs(np.log([1, 1.1, 0.78, 1.22]))
    assert found.tokens == 4
    assert found.mean == pytest.approx(distance.mean())
    assert found.p50 == pytest.approx(np.median(distance))
    assert found.max == pytest.approx(-math.log(0.78))
    assert found.p99 <= found.max
    assert found.outside == 0.5
    assert found.kl == pytest.approx(np.mean([0, 0.1 - math.log(1.1), -0.22 - math.log(0.78), 0.22 - math.log(1.22)]))


def test_the_estimate_of_the_divergence_is_the_divergence_on_many_draws():
    p, q = np.asarray([0.5, 0.3, 0.2]), np.asarray([0.4, 0.4, 0.2])
    drawn = np.random.default_rng(0).choice(3, size=200_000, p=p)
    exact = float((p * np.log(p / q)).sum())
    assert difference(np.log(q)[drawn], np.log(p)[drawn]).kl == pytest.approx(exact, rel=0.05)


def test_nothing_and_unequal_lengths_are_no_difference():
    for scored, sampled in (([], []), ([-1.0], [-1.0, -2.0])):
        with pytest.raises(ValueError, match="log-probs against"):
            difference(scored, sampled)


@pytest.mark.parametrize(
    ("observed", "bound"),
    [(0.005, 0.02), (0.01, 0.03), (0.0101, 0.04), (0.33, 1.0), (3e-7, 1e-6), (0.0, 1e-6), (2.0, 6.0)],
)
def test_a_bound_is_three_times_what_was_seen_rounded_up_to_one_digit(observed, bound):
    assert recommended(observed) == pytest.approx(bound)


@given(st.floats(1e-6, 100))
def test_a_bound_is_never_below_its_margin_and_not_twice_as_much(observed):
    assert 3 * observed * (1 - 1e-6) <= recommended(observed) <= 6 * observed


# ---- pairs


def sampled(length, *, prefilled=True, prompt=3, offset=0.0):
    decoded = [-1.0 - offset] * length
    return Sampled(tokens=[5] * (prompt + length), decoded=decoded, prefilled=decoded if prefilled else None)


def scored(*samples, value):
    """A trainer's log-probs: those of prompt tokens are far off, and must not be compared."""
    return Scored(
        log_probs=[[-50.0] * s.start + [value] * len(s.decoded) for s in samples],
        device="CPU",
    )


def config_of(folder, **sections):
    return RunConfig.model_validate({"model": {"hf_checkpoint": str(folder)}, **sections})


def test_only_response_tokens_are_compared_by_position_where_some_are_late(folder):
    samples = [sampled(FIRST + 6), sampled(10)]
    pair = pair_of(config_of(folder), "e", "t", samples, scored(*samples, value=-1.0005))
    tokens = {name: row.tokens for name, row in pair.rows.items()}
    assert tokens[DECODE] == FIRST + 16
    assert tokens[f"{DECODE}, first {FIRST}"] == FIRST + 10
    assert tokens[f"{PREFILL}, rest"] == 6
    assert tokens[BETWEEN] == FIRST + 16
    assert pair.rows[DECODE].max == pytest.approx(5e-4)
    assert pair.within
    short = pair_of(config_of(folder), "e", "t", samples[1:], scored(samples[1], value=-1.0))
    assert set(short.rows) == {DECODE, PREFILL, BETWEEN}


def test_an_engine_that_cannot_score_at_the_temperature_has_decode_alone(folder):
    samples = [sampled(10, prefilled=False)]
    pair = pair_of(config_of(folder), "e", "t", samples, scored(*samples, value=-1.0))
    assert set(pair.rows) == {DECODE}


@pytest.mark.parametrize(
    ("sections", "value", "within"),
    [
        ({}, -1.0009, True),
        ({}, -1.0011, False),
        ({"train": {"bf16": True}}, -1.02, True),
        ({"train": {"bf16": True}, "parity": {"max_mean_diff": 0.01}}, -1.02, False),
        ({"train": {"bf16": True}, "parity": {"max_p99_diff": 0.01}}, -1.02, False),
        ({}, math.nan, False),
    ],
)
def test_a_pair_is_held_against_the_bounds_of_its_own_gate(folder, sections, value, within):
    samples = [sampled(10)]
    pair = pair_of(config_of(folder, **sections), "e", "t", samples, scored(*samples, value=value))
    assert pair.within is within


def test_a_run_that_recomputes_is_judged_by_what_it_trains_with(folder):
    shifted = replace(sampled(10), decoded=[-2.0] * 10)
    config = config_of(folder, rollout={"recompute_logprobs_via_prefill": True})
    pair = pair_of(config, "e", "t", [shifted], scored(shifted, value=-1.0))
    assert pair.gated == PREFILL
    assert pair.within
    assert not pair_of(config_of(folder), "e", "t", [shifted], scored(shifted, value=-1.0)).within


def test_the_table_tells_verdicts_reasons_and_bounds(folder):
    samples = [sampled(10)]
    far = pair_of(config_of(folder), "fa3", "--bf16", samples, scored(*samples, value=-1.005))
    near = pair_of(config_of(folder), "as the run", "--bf16 false", samples, scored(*samples, value=-1.0))
    broken = Pair(engine="fa4", trainer="--bf16", rows={}, gate=(1e-3, 1e-2), error="no such backend")
    text = table([far, near, broken])
    assert "trainer - decode: BEYOND the gate's bounds, mean 0.001 and p99 0.01" in text
    assert "bounds that fit: --parity.max-mean-diff 0.02 --parity.max-p99-diff 0.02" in text
    assert "trainer - decode: within" in text
    assert "engine fa4 | trainer --bf16\n  FAILED: no such backend" in text
    assert broken.within is False
    assert broken.as_json()["recommended"] is None
    last = verdict([far, near, broken])
    assert last.startswith("beyond the gate, or failed: engine fa3 | trainer --bf16; engine fa4 | trainer --bf16\n")
    assert last.endswith("bounds that fit all, 3 times what was seen: mean 0.02, p99 0.02")


# ---- the command line


def test_a_model_folder_is_enough(folder):
    found = read_options(["--hf-checkpoint", str(folder)])
    assert [(s.name, s.flags) for s in (*found.engines, *found.trainers)] == [("as the run", "")] * 2
    assert found.prompt_lengths == (32,)
    prompts = prompts_of(found)
    assert [len(p) for p in prompts] == [32] * 16
    assert all(0 <= token < len(LETTERS) for p in prompts for token in p)
    assert prompts == prompts_of(found)


def test_every_engine_is_paired_with_every_trainer(folder):
    argv = ["--hf-checkpoint", str(folder), "--engine", "--sglang-dtype float32", "--engine=--sglang-dtype bfloat16"]
    argv += ["--trainer", "--bf16", "--trainer", "", "--rollout-temperature", "0.7", "--prompt-lengths", "3", "5"]
    found = read_options([*argv, "--num-prompts", "3"])
    assert [s.config.engine.dtype for s in found.engines] == ["float32", "bfloat16"]
    assert [s.name for s in found.trainers] == ["--bf16", "as the run"]
    assert {k: (c.engine.dtype, c.train.bf16) for k, c in found.pairs.items()} == {
        (0, 0): ("float32", True),
        (0, 1): ("float32", False),
        (1, 0): ("bfloat16", True),
        (1, 1): ("bfloat16", False),
    }
    assert all(c.rollout.temperature == 0.7 for c in found.pairs.values())
    assert [len(p) for p in prompts_of(found)] == [3, 5, 3]


def test_prompts_are_the_runs_where_it_has_some(folder, tmp_path):
    data = write_rows(tmp_path / "p.jsonl", [{"input": "count a"}, {"input": "bb"}])
    argv = ["--hf-checkpoint", str(folder), "--prompt-data", data, "--num-prompts", "3"]
    assert [len(p) for p in prompts_of(read_options(argv))] == [7, 2, 7]
    assert read_options([*argv, *SFT]).prompt_lengths == (32,)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trainer", "--bf17"], "--bf17: no such flag\n    fix: did you mean --bf16"),
        (["--trainer", "--bf16 'x"], "--trainer: cannot be read"),
        (["--engine", "--sglang-attention-backend fa3"], "the torch engine does not take --sglang-attention-backend"),
        (["--engine"], "--engine: has no value"),
        (["--num-prompts", "none"], "--num-prompts: got 'none'"),
        (["--num-prompts", "0"], "a number from 1"),
        (["--prompt-lengths", "8", "0"], "--prompt-lengths: got '0'"),
        (["--timeout", "nan"], "--timeout: got 'nan'"),
        (["--json", "nowhere/p.json"], "nowhere: no such folder"),
        (["--hf-checkpoint", "nowhere"], "nowhere"),
        (["--rollout-temperature", "0"], "--rollout-temperature: got '0'"),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_starts(folder, words, told, capsys):
    assert main(["--hf-checkpoint", str(folder), "--device", "cpu", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_model_without_a_vocabulary_size_needs_prompts(folder, tmp_path):
    broken = make_model(tmp_path / "model")
    settings = json.loads((broken / "config.json").read_text())
    del settings["vocab_size"]
    (broken / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="names no vocab_size"):
        read_options(["--hf-checkpoint", str(broken)])


def test_help_is_told(capsys):
    assert main(["--help"]) == 0
    assert "--prompt-lengths" in capsys.readouterr().out
