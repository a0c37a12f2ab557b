import inspect
import re
from pathlib import Path

import pytest

from miles.config.eval_file import read_eval_file
from miles.config.eval_settings import settings_of
from miles.config.schema import EvalDataset, RunConfig
from miles.config.walk import leaves
from miles.core.samples import Sample
from miles.rollout.filter_hub import dynamic_sampling_filters
from miles.rollout.inference_rollout.eval_summary import summarize
from tests.fast.ray.test_eval_only import SHOWN

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "user-guide" / "evaluation.md").read_text(encoding="utf-8")


def table(first):
    """Cells of the table whose first column is called `first`, code marks removed."""
    rows = PAGE[PAGE.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_settings_is_complete_and_its_flags_exist():
    rows = table("setting of a dataset")
    assert {row[0] for row in rows} == set(EvalDataset.model_fields) - {"name", "path"}
    known = {flag for leaf in leaves() for flag in leaf.flags}
    assert {flag for row in rows for flag in re.findall(r"--[\w-]+", " ".join(row[1:3]))} <= known


@pytest.mark.parametrize("row", table("setting of a dataset"), ids=lambda row: row[0])
def test_each_setting_is_taken_from_the_flags_that_the_page_names(row):
    name, *columns = row[:3]
    odd = {"str": "odd", "int": 13, "float": 0.125, "list[str]": ["odd"], "list[int]": [13]}
    by_flag = {flag: leaf for leaf in leaves() for flag in leaf.flags}
    bare = settings_of(RunConfig(), EvalDataset(name="a", path="a"))
    for column in columns:
        for flag in re.findall(r"--[\w-]+", column):
            section, field = by_flag[flag].path.split(".")
            value = odd[by_flag[flag].type_name]
            cfg = RunConfig.model_validate({section: {field: value}})
            found = getattr(settings_of(cfg, EvalDataset(name="a", path="a")), name)
            assert (list(found) if isinstance(found, tuple) else found) == value != getattr(bare, name)


def test_the_example_file_means_what_the_page_says(tmp_path):
    text = PAGE.split("```yaml\n", 1)[1].split("```", 1)[0]
    file = tmp_path / "eval.yaml"
    file.write_text(text)
    cfg = RunConfig.model_validate({"eval": {"datasets": read_eval_file(str(file)), "top_k": 5}})
    sampled, greedy = (settings_of(cfg, dataset) for dataset in cfg.eval.datasets)
    assert (sampled.n_samples_per_eval_prompt, sampled.temperature, sampled.top_k) == (4, 0.6, 5)
    assert (greedy.n_samples_per_eval_prompt, greedy.temperature, greedy.top_k) == (1, 0.0, -1)
    assert sampled.label_key == greedy.label_key == "label"


def test_the_table_of_metrics_is_what_an_evaluation_reports():
    from miles.config.eval_settings import EvalSettings

    named = set()
    for row in table("metric"):
        named |= {part if part.startswith("eval/") else f"eval/NAME{part}" for part in row[0].split(", ")}
    lengths = {f"eval/NAME/response_len/{x}" for x in ("mean", "median", "p95", "max")}
    named = {n.replace("@K", "@1") for n in named if n.count("/") < 3} - {
        "eval/NAME/median",
        "eval/NAME/p95",
        "eval/NAME/max",
    }
    _, found = summarize(EvalSettings(name="NAME", path="p"), [[[Sample(index=0, reward=1.0)]]], num_dropped=1)
    assert set(found) == named | lengths


def test_the_table_of_filters_names_every_filter():
    named = {row[0] for row in table("filter") if row[0]}
    functions = dict(inspect.getmembers(dynamic_sampling_filters, inspect.isfunction))
    assert named == {name for name in functions if name.startswith("check_")}
    source = inspect.getsource(dynamic_sampling_filters)
    reasons = {reason for row in table("filter") for reason in row[2].split(",")[0:1]}
    assert all(reason.removesuffix("R") in source for reason in reasons)


def test_the_table_that_is_shown_has_the_console_s_columns():
    from miles.utils.tracking_utils.eval_table import eval_table

    metrics = {
        "eval/heldout": 0.0, "eval/heldout/pass@1": 0.0, "eval/heldout/num_prompts": 32.0, "eval/heldout/num_samples": 32.0,
        "eval/heldout/failed": 0.0, "eval/heldout/unscored": 0.0, "eval/heldout/truncated_ratio": 0.8125,
        "eval/heldout/response_len/mean": 7.3125, "eval/heldout/response_len/p95": 8.0,
    }  # fmt: skip
    assert eval_table(metrics) == SHOWN
