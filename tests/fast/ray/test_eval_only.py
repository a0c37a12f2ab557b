"""A run of no steps: it evaluates the model folder, shows a table and ends."""

import json
import shlex
from pathlib import Path

from tests.fast.ray.conftest import TrainProcess, metrics

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "user-guide" / "evaluation.md").read_text(encoding="utf-8")
_SECTION = PAGE[PAGE.index("## Only evaluating") :]
COMMAND = _SECTION.split("python train.py ", 1)[1].split("```", 1)[0].replace("\\\n", " ")
SHOWN = _SECTION.split("```\n", 3)[2].splitlines()
"""The command of docs/user-guide/evaluation.md and the table that it prints."""


async def share_of_digits(args, sample, **kwargs):
    if sample.index == 1:
        return None if args.rollout_temperature == 0 else 0.0
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)


def test_a_run_of_no_steps_evaluates_and_ends(task, tmp_path):
    run = tmp_path / "run"
    held = str(task / "heldout.jsonl")
    config = tmp_path / "eval.yaml"
    config.write_text(
        "eval:\n"
        "  defaults: {max_response_len: 4, max_prompts: 3}\n"
        "  datasets:\n"
        f"    - {{name: greedy, path: {held}, temperature: 0, custom_rm_path: tests.fast.ray.test_eval_only.share_of_digits}}\n"
        f"    - {{name: sampled, path: {held}, n_samples_per_eval_prompt: 2, min_new_tokens: 4}}\n"
    )
    flags = shlex.split(COMMAND.replace("task/", f"{task}/").replace("--run-dir run", f"--run-dir {run}"))
    ended = TrainProcess(*flags, "--eval-config", str(config), "--torch-threads", "1").end()
    assert (ended.status, ended.left_behind) == (0, []), ended.err
    (row,) = [row for row in metrics(run) if "eval/sampled" in row]
    assert row["step"] == -1
    assert row["eval/sampled/num_samples"] == 6.0
    assert row["eval/sampled/response_len/mean"] == row["eval/sampled/response_len/max"] == 4.0
    assert row["eval/greedy/unscored"] == row["eval/greedy/failed"] == 1.0
    lines = [line.split() for line in ended.out.splitlines()]
    header = next(line for line in lines if line[:2] == ["dataset", "score"])
    assert header[2:4] == ["pass@1", "pass@2"]
    assert [word for word in header if word != "pass@2"] == SHOWN[0].split()
    assert next(line for line in lines if line[0] == "sampled")[1] == f"{row['eval/sampled']:.4f}"
    assert next(line for line in lines if line[0] == "heldout")[4:6] == SHOWN[1].split()[3:5] == ["32", "32"]
    found = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert [(r["step"], r["dataset"]) for r in found] == [(-1, "greedy"), (-1, "sampled"), (-1, "heldout")]
    assert found[0]["score"] == row["eval/greedy"]
    assert "share_of_digits" in found[0]["errors"][0]
    assert len((run / "eval" / "sampled" / "before-training.jsonl").read_text().splitlines()) == 6
    assert not list((run / "logs").glob("trainer-*"))
