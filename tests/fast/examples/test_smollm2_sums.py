import json
from pathlib import Path

import pytest

from examples.smollm2 import sums
from miles.config.batch_math import batch_plan
from miles.config.load import read

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm2-sums-gpu.yaml"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    pytest.importorskip("reasoning_gym")
    folder = tmp_path_factory.mktemp("sums")
    assert sums.main(["--out", str(folder), "--rows", "600", "--held-out", "40", "--seed", "3"]) == 0
    return [
        [json.loads(line) for line in (folder / f"sums-{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    ]


def problem_of(row):
    assert row["input"].startswith(sums.EXAMPLES)
    return row["input"].removeprefix(sums.EXAMPLES).removesuffix(" =")


def test_no_sum_is_both_trained_on_and_held_out(files):
    train, held_out = ({problem_of(row) for row in rows} for rows in files)
    assert not train & held_out
    assert [len(rows) for rows in files] == [600, 40]
    assert len(held_out) == 40


def test_a_label_is_the_value_of_the_sum_and_the_prompt_ends_where_it_begins(files):
    for row in (*files[0], *files[1]):
        words = problem_of(row).split()
        value = int(words[0])
        for sign, digit in zip(words[1::2], words[2::2], strict=True):
            value += int(digit) if sign == "+" else -int(digit)
        assert row["label"] == str(value)
        assert row["metadata"]["terms"] == len(words[::2])
        assert row["input"].endswith(" =")


def test_sums_of_two_and_of_three_digits_are_about_equally_frequent_in_training(files):
    twos = sum(row["metadata"]["terms"] == 2 for row in files[0])
    assert 0.4 < twos / len(files[0]) < 0.6


def test_what_is_held_out_does_not_depend_on_the_seed():
    pytest.importorskip("reasoning_gym")
    (_, one), (train, _) = sums.split(10, 20, seed=0), sums.split(300, 1, seed=9)
    assert not {problem_of(row) for row in one} & {problem_of(row) for row in train}


def test_the_recipe_cuts_each_batch_evenly_and_evaluates_on_what_is_held_out():
    config = read([str(RECIPE)]).config
    plan = batch_plan(config)
    assert plan.is_even
    assert config.cluster.colocate
    assert config.train.bf16
    assert {Path(dataset.path).name for dataset in config.eval.datasets} == {"sums-heldout.jsonl"}
    assert [dataset.name for dataset in config.eval.datasets if dataset.temperature == 0.0] == ["exact", "lenient"]
    assert config.rollout.stop == ["\n"]
    assert [Path(path).name for path in config.data.prompt_data] == ["sums-train.jsonl"]
