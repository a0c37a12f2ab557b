import pytest

from miles.config.dump import dump, undump
from miles.config.eval_settings import eval_settings, settings_of
from miles.config.schema import EvalDataset, RunConfig
from miles.core.samples import Sample
from miles.rollout.base_types import GenerateFnOutput
from tests.fast.rollout.support import ids, make_args, make_rollout, run, write_rows
from tests.fast.rollout.test_evaluate import evaluate, solve

HERE = __name__
CONTEXT = 64
PROMPT = len("3+1=")

SAMPLING = {
    "temperature": ("temperature", 0.7, 0.5, 0.3, 1.0),
    "top_p": ("top_p", 0.9, 0.8, 0.7, 1.0),
    "top_k": ("top_k", 50, 20, 5, -1),
    "max_response_len": ("max_new_tokens", 7, 6, 5, CONTEXT - PROMPT),
    "stop": ("stop", ["?"], None, ["x", "y"], []),
    "stop_token_ids": ("stop_token_ids", [3], None, [4], []),
    "min_new_tokens": ("min_new_tokens", None, 2, 3, 0),
    "max_context_len": ("max_new_tokens", 10, 9, 8, 8),
}
"""Setting -> its name in a request, and its values in rollout, evaluation and dataset, and what a null gives there."""


def params(tmp_path, own, evals=None, rollout=None):
    """Sampling parameters of the request for one prompt of a dataset with the settings `own`."""
    found = []

    async def test():
        path = write_rows(tmp_path / "d.jsonl", [{"input": "3+1=", "label": "4"}])
        datasets = [{"name": "d", "path": path, **own}]
        sections = {"eval": evals or {}, "rollout": rollout or {}}
        _, engine = await evaluate(tmp_path, solve, datasets, **sections)
        found.extend(r["sampling_params"] for r in engine.requests)

    run(test())
    return found[0]


@pytest.mark.parametrize("name", SAMPLING)
def test_a_dataset_comes_before_evaluation_and_evaluation_before_the_rollout(tmp_path, name):
    key, rollout, evaluation, own, _ = SAMPLING[name]
    rollouts = {} if rollout is None else {name: rollout}
    evals = {} if evaluation is None else {name: evaluation}
    lost = PROMPT if name == "max_context_len" else 0

    def less(value):
        return value - lost if lost else value

    if rollout is not None:
        assert params(tmp_path, {}, rollout=rollouts)[key] == less(rollout)
    if evaluation is not None:
        assert params(tmp_path, {}, evals, rollouts)[key] == less(evaluation)
    assert params(tmp_path, {name: own}, evals, rollouts)[key] == less(own)


@pytest.mark.parametrize("name", SAMPLING)
def test_null_unsets_a_setting_for_one_dataset(tmp_path, name):
    # Case H13.
    key, rollout, evaluation, _, unset = SAMPLING[name]
    rollouts = {} if rollout is None else {name: rollout}
    evals = {} if evaluation is None else {name: evaluation}
    assert params(tmp_path, {name: None}, evals, rollouts)[key] == unset


ROWS = [
    {
        "input": "3+1=",
        "label": "4",
        "question": "5+1=",
        "answer": "6",
        "info": {"hard": True},
        "gear": [{"type": "function"}],
    },
    {"input": "2+1=", "label": "9", "question": "4+1=", "answer": "5", "info": {"hard": False}, "gear": []},
]


def results(tmp_path, own, rows=ROWS, script=solve, **sections):
    """Samples, metrics and requests of one dataset with the settings `own`."""
    found = []

    async def test():
        datasets = [{"name": "d", "path": write_rows(tmp_path / "d.jsonl", rows), **own}]
        output, engine = await evaluate(tmp_path, script, datasets, **sections)
        found.append((output.data["d"]["samples"], output.metrics, engine.requests))

    run(test())
    return found[0]


def prompts(tmp_path, own, **sections):
    return [sample.prompt for sample in results(tmp_path, own, **sections)[0]]


def test_keys_of_the_prompt(tmp_path):
    assert prompts(tmp_path, {"input_key": "question"}) == ["5+1=", "4+1="]
    assert prompts(tmp_path, {}, eval={"input_key": "question"}) == ["5+1=", "4+1="]
    assert prompts(tmp_path, {"input_key": "input"}, eval={"input_key": "question"}) == ["3+1=", "2+1="]
    assert prompts(tmp_path, {}) == ["3+1=", "2+1="]


def test_keys_of_the_label(tmp_path):
    def labels(own, **sections):
        return [sample.label for sample in results(tmp_path, own, **sections)[0]]

    assert labels({"label_key": "answer"}) == ["6", "5"]
    assert labels({}, eval={"label_key": "answer"}) == ["6", "5"]
    assert labels({}) == ["4", "9"]
    assert labels({"label_key": None}, eval={"label_key": "answer"}) == [None, None]


def test_keys_of_the_tools(tmp_path):
    def tools(own, **sections):
        return [sample.metadata.get("tools") for sample in results(tmp_path, own, **sections)[0]]

    gear = [row["gear"] for row in ROWS]
    assert tools({"tool_key": "gear"}) == gear
    assert tools({}, eval={"tool_key": "gear"}) == gear
    assert not any(tools({"tool_key": None}, eval={"tool_key": "gear"}))
    assert not any(tools({}))


def test_metadata_is_read_and_overridden(tmp_path):
    samples, *_ = results(tmp_path, {"metadata_key": "info", "metadata_overrides": {"hard": 7, "source": "d"}})
    assert [s.metadata for s in samples] == [{"hard": 7, "source": "d"}] * 2
    samples, *_ = results(tmp_path, {"metadata_key": "info"})
    assert [s.metadata for s in samples] == [{"hard": True}, {"hard": False}]


def test_the_number_of_samples(tmp_path):
    assert len(results(tmp_path, {"n_samples_per_eval_prompt": 3})[0]) == 6
    assert len(results(tmp_path, {}, eval={"n_samples_per_eval_prompt": 2})[0]) == 4
    assert len(results(tmp_path, {"n_samples_per_eval_prompt": None}, eval={"n_samples_per_eval_prompt": 2})[0]) == 2


def test_long_prompts_are_dropped_and_counted(tmp_path):
    rows = [*ROWS, {"input": "10000+1=", "label": "10001"}]
    for own, evals in (
        ({"max_prompt_len": 5}, {}),
        ({}, {"max_prompt_len": 5}),
        ({"max_prompt_len": 5}, {"max_prompt_len": 2}),
    ):
        samples, metrics, _ = results(tmp_path, own, rows, eval=evals)
        assert len(samples) == 2
        assert metrics["eval/d/dropped_prompts"] == 1.0
    samples, metrics, _ = results(tmp_path, {"max_prompt_len": None}, rows, eval={"max_prompt_len": 5})
    assert len(samples) == 3
    assert "eval/d/dropped_prompts" not in metrics


async def says_b(input):
    sample = input.sample
    sample.append_response(ids("b"), [-1.0], f"b{input.args.rollout_temperature}", "1")
    sample.status = Sample.Status.COMPLETED
    return GenerateFnOutput(samples=sample)


def test_a_generate_function_of_its_own_sees_the_settings_of_its_dataset(tmp_path):
    own = {"custom_generate_function_path": f"{HERE}.says_b", "temperature": 0.25}
    samples, _, requests = results(tmp_path, own)
    assert [s.response for s in samples] == ["b0.25"] * 2
    assert requests == []
    everywhere = {"custom_generate_function_path": f"{HERE}.says_b"}
    assert results(tmp_path, {}, rollout=everywhere)[2] == []
    assert len(results(tmp_path, {"custom_generate_function_path": None}, rollout=everywhere)[2]) == 2


async def seven(args, sample, **_):
    return 7.0


async def several(args, sample, **_):
    return {"score": 1.0, "acc": 0.25}


def score(tmp_path, own, **sections):
    return results(tmp_path, own, **sections)[1].get("eval/d")


def test_rewards_of_its_own(tmp_path):
    assert score(tmp_path, {}) == 0.0
    assert score(tmp_path, {"custom_rm_path": f"{HERE}.seven"}) == 7.0
    rows = [{"input": "2+1=", "label": "3"}, {"input": "3+1=", "label": "x"}, {"input": "5+1=", "label": "y"}]
    by_type = results(tmp_path, {"rm_type": "exact"}, rows, reward={"custom_rm_path": f"{HERE}.seven"})[1]
    assert by_type["eval/d"] == pytest.approx(2 / 3)
    unset = results(
        tmp_path, {"custom_rm_path": None}, rows, reward={"custom_rm_path": f"{HERE}.seven", "rm_type": "exact"}
    )
    assert unset[1]["eval/d"] == pytest.approx(2 / 3)


def test_the_entry_of_a_reward_object(tmp_path):
    reward = {"custom_rm_path": f"{HERE}.several", "reward_key": "score"}
    assert score(tmp_path, {}, reward=reward) == 1.0
    assert score(tmp_path, {}, reward={**reward, "eval_reward_key": "acc"}) == 0.25
    assert score(tmp_path, {"reward_key": "acc"}, reward=reward) == 0.25
    assert score(tmp_path, {"reward_key": "score"}, reward={**reward, "eval_reward_key": "acc"}) == 1.0


async def temperature_of_args(args, sample, **_):
    return args.rollout_temperature


def test_a_reward_function_sees_the_settings_of_its_dataset(tmp_path):
    reward = {"custom_rm_path": f"{HERE}.temperature_of_args"}
    assert score(tmp_path, {"temperature": 0.125}, reward=reward) == 0.125


def test_a_row_names_its_reward_before_the_dataset_does(tmp_path):
    row = {"input": "2+1=", "label": "3.0"}
    assert score(tmp_path, {"rm_type": "math"}, rows=[row]) == 1.0
    assert score(tmp_path, {"rm_type": "math"}, rows=[{**row, "metadata": {"rm_type": "exact"}}]) == 0.0


def test_the_tests_of_this_file_name_every_setting_of_a_dataset():
    from pathlib import Path

    text = Path(__file__).read_text() + (Path(__file__).parent / "test_evaluate.py").read_text()
    assert [name for name in EvalDataset.model_fields if f'"{name}"' not in text and f"{name}=" not in text] == []


def test_what_a_dataset_does_not_say_stays_unsaid_through_a_dump():
    # Case H13.
    given = {
        "rollout": {"top_k": 50},
        "eval": {"datasets": [{"name": "a", "path": "a", "top_k": None}, {"name": "b", "path": "b"}]},
    }
    config = RunConfig.model_validate(given)
    again = undump(dump(config))
    for cfg in (config, again):
        assert [s.top_k for s in eval_settings(cfg)] == [-1, 50]
    assert [d.model_dump() for d in config.eval.datasets] == given["eval"]["datasets"]


def test_pairs_take_the_settings_of_evaluation():
    cfg = RunConfig.model_validate(
        {"eval": {"prompt_data": ["a", "a.jsonl"], "temperature": 0.5, "min_new_tokens": 3}}
    )
    (found,) = eval_settings(cfg)
    assert (found.name, found.path, found.temperature, found.min_new_tokens) == ("a", "a.jsonl", 0.5, 3)
    assert settings_of(cfg, EvalDataset(name="b", path="b", temperature=0)).temperature == 0


def test_datasets_with_the_same_built_in_reward_share_its_workers_and_close_ends_them(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    datasets = [{"name": n, "path": path, "rm_type": "math"} for n in "ab"] + [
        {"name": "c", "path": path, "rm_type": "exact"}
    ]
    rollout = make_rollout(make_args(tmp_path, eval={"datasets": datasets}))
    hubs = [d.reward_hub for d in rollout._evaluator.datasets]
    assert hubs[0] is hubs[1] is not hubs[2]
    run(rollout.close())
