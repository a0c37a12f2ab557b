import json

import pytest

from miles.config.checks_prefill import PATH, PREFILL_CHECKS
from miles.config.checks_scoring import SCORING_CHECKS
from miles.config.known import run_checks
from miles.config.load import read
from miles.config.preflight import PREFLIGHT
from miles.config.schema import RunConfig

FLAG = "--recompute-logprobs-via-prefill"


def issues(*, checks=PREFILL_CHECKS, **sections):
    sections["rollout"] = {"num_rollout": 1, "recompute_logprobs_via_prefill": True, **sections.get("rollout", {})}
    return [(i.path, i.problem, i.fix) for i in run_checks(checks, RunConfig.model_validate(sections))]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"weights": {"mode": "retract"}},
        {"rollout": {"temperature": 0.7}},
        {"rollout": {"function_path": "miles.rollout.sglang_rollout.generate_rollout"}},
        {"rollout": {"custom_generate_function_path": "a.b"}},
        {"rollout": {"num_rollout": 0}, "debug": {"train_only": True}},
        {"rollout": {"recompute_logprobs_via_prefill": False}, "weights": {"mode": "in_place"}},
    ],
)
def test_runs_whose_engines_can_score_again_pass(sections):
    assert issues(**sections) == []


@pytest.mark.parametrize(
    ("sections", "problem", "fix"),
    [
        ({"algorithm": {"loss_type": "sft_loss"}}, "no engine sampled the responses", f"leave out {FLAG}"),
        ({"debug": {"train_only": True}}, "a run that only trains has none", f"leave out {FLAG}"),
        ({"debug": {"load_rollout_data": "d/{rollout_id}.jsonl"}}, "only trains has none", f"leave out {FLAG}"),
        ({"rollout": {"function_path": "my.rollout"}}, "the run has my.rollout", "--rollout-function-path miles"),
        ({"weights": {"mode": "in_place"}}, "with KV of older ones", "--pause-generation-mode drain"),
    ],
)
def test_runs_whose_responses_cannot_be_scored_again_are_refused(sections, problem, fix):
    ((path, found, way_out),) = issues(**sections)
    assert path == PATH
    assert problem in found
    assert fix in way_out


def test_sglang_scores_prompts_at_temperature_1_only(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    words = ["--hf-checkpoint", str(tmp_path), "--num-rollout", "1", FLAG, "--rollout-temperature", "0.7"]

    def told(gpus):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        return [(i.path, i.problem, i.fix) for i in run_checks(SCORING_CHECKS, read(words).config)]

    assert told("") == []
    ((path, problem, fix),) = told("0")
    assert path == PATH
    assert problem == "SGLang scores prompts at temperature 1, and responses are sampled at 0.7"
    assert fix == f"--rollout-temperature 1, or leave out {FLAG}"
    words[-1] = "1"
    assert told("0") == []
    assert set(SCORING_CHECKS) <= set(PREFLIGHT)
