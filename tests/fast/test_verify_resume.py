import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from miles.config.load import load
from miles.core.ledger import Ledger
from miles.errors import ConfigError
from miles.ray.rollout_client import IntervalEvaluation
from miles.utils import checkpoint_folder
from miles.verify_resume import compare, tensors
from miles.verify_resume.main import Lived, compare_runs, main, table
from miles.verify_resume.options import Verification, draw, phases_of, read_options
from miles.verify_resume.points import KillPoint, begun, seconds_of

STEPS = range(3)
RUN = ["--num-rollout", "3", "--rm-type", "exact", "--label-key", "label"]
EVALUATES = ["--eval-interval", "2", "--eval-prompt-data", "held", "held.jsonl"]


def config(*flags):
    return load([*RUN, *EVALUATES, *flags])


def verification(tmp_path, *flags):
    return Verification(
        config=config(*flags), argv=(), out=tmp_path, keep=True, json_path=None, steps=STEPS, points=()
    )


def sample(group, index, step):
    return {
        "group_index": group,
        "index": index,
        "tokens": [5, 6, 7 + index, 8],
        "response_length": 2,
        "rollout_log_probs": [-0.5, -0.25 - index],
        "reward": 1.0,
        "version_spans": [[0, str(step + 1)]],
        "cached_tokens": index,
    }


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, steps=STEPS) -> Path:
    """The files of a run of two groups of two samples a step, saved after each step."""
    ledger = Ledger()
    for step in range(steps.stop):
        groups = [2 * step, 2 * step + 1]
        for group in groups:
            ledger.issue(group)
            ledger.finish(group)
        ledger.lease(groups)
        ledger.train(groups)
        if step not in steps:
            continue
        rows = [sample(g, 2 * g + i, step) for g in groups for i in range(2)]
        places = [{"at": [n // 2, n % 2], "sample": row} for n, row in enumerate(rows)]
        lines(folder / "samples" / f"{step}.jsonl", [{"kind": "rollout samples"}, *places])
        with checkpoint_folder.writing(folder / "checkpoints", step + 1) as draft:
            weights = torch.arange(6.0).reshape(2, 3) + step
            (draft / "trainer" / "shards").mkdir(parents=True)
            (draft / "hf").mkdir()
            save_file({"model.w": weights, "exp_avg.w": weights / 3}, draft / "trainer" / "shards" / "0.safetensors")
            save_file({"torch": torch.arange(5, dtype=torch.uint8)}, draft / "trainer" / "rng_rank0.safetensors")
            (draft / "trainer" / "trainer.json").write_text(json.dumps({"state": {"optimizer_steps": step + 1}}))
            save_file({"w": weights.bfloat16()}, draft / "hf" / "model.safetensors")
            state = {
                "next_step": step + 1,
                "weight_version": step + 1,
                "rollout": {
                    "data_source": {"epoch": 0, "offset": 2 * step + 2, "buffer": []},
                    "ledger": ledger.state_dict(),
                },
            }
            checkpoint_folder.write_state(draft, state)
        if (step + 1) % 2 == 0:
            lines(
                folder / "eval" / "held" / f"{step:07d}.jsonl", [{"sample_index": i, "reward": 0.5} for i in range(4)]
            )
    return folder


@pytest.fixture
def runs(tmp_path):
    """An uninterrupted run, and one killed in step 2 after its generation and resumed at step 1 or 2."""
    killed = make_run(tmp_path / "killed-1", range(2))
    resumed = make_run(tmp_path / "resumed", range(2, 3))
    lives = [
        Lived(killed, 0, None, "step 2, generate, 50% into it"),
        Lived(resumed, 2, killed / "checkpoints", None),
    ]
    return Lived(make_run(tmp_path / "uninterrupted"), 0, None, None), lives


def differences(tmp_path, runs, *flags):
    return {f.what: f.difference for f in compare_runs(verification(tmp_path, *flags), *runs) if f.difference}


MODES = pytest.mark.parametrize("flags", [(), ("--deterministic-mode",)])


@MODES
def test_equal_runs_have_no_difference_and_everything_was_looked_at(tmp_path, runs, flags):
    findings = compare_runs(verification(tmp_path, *flags), *runs)
    assert [f.difference for f in findings if f.difference] == []
    assert all(f.count for f in findings)
    counts = {f.what: f.count for f in findings}
    if flags:
        assert counts[compare.SAMPLES] == 12
        assert counts["trainer: model, moments, counters, random states"] == 9
    else:
        assert counts[compare.ACCOUNTS] == 6
    assert counts[compare.EVALUATIONS] == 4


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_sample(run, step, change):
    path = run.run_dir / "samples" / f"{step}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[2]["sample"])
    lines(path, rows)


def last(run):
    return run.run_dir / "checkpoints" / "iter_0000003"


def test_one_changed_tensor_is_named_with_its_place(tmp_path, runs):
    path = last(runs[1][-1]) / "trainer" / "shards" / "0.safetensors"
    weights = torch.arange(6.0).reshape(2, 3) + 2
    moments = weights / 3
    moments[1, 0] = torch.nextafter(moments[1, 0], torch.tensor(9.0))
    save_file({"model.w": weights, "exp_avg.w": moments}, path)
    found = differences(tmp_path, runs, "--deterministic-mode")
    (text,) = found.values()
    assert text.startswith(
        "iter_0000003/trainer/shards/0.safetensors: exp_avg.w: 1 of 6 values differ, first at [1, 0]"
    )
    assert differences(tmp_path, runs) == {}  # only the restored state is compared then


@pytest.mark.parametrize("what", ["random state", "counter", "export", "missing"])
def test_every_other_part_of_the_trainer_is_compared(tmp_path, runs, what):
    folder = last(runs[1][-1])
    if what == "random state":
        save_file({"torch": torch.ones(5, dtype=torch.uint8)}, folder / "trainer" / "rng_rank0.safetensors")
        wanted = "rng_rank0.safetensors: torch: 4 of 5 values differ, first at [0]"
    elif what == "counter":
        edit_json(folder / "trainer" / "trainer.json", lambda v: v["state"].update(optimizer_steps=4))
        wanted = "trainer.json: state.optimizer_steps: 3 and 4"
    elif what == "export":
        save_file({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, folder / "hf" / "model.safetensors")
        wanted = "hf/model.safetensors: w: 6 of 6 values differ, first at [0, 0]"
    else:
        (folder / "trainer" / "trainer.json").unlink()
        wanted = "trainer.json: only in one of the two"
    (text,) = differences(tmp_path, runs, "--deterministic-mode").values()
    assert wanted in text


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda s: s["tokens"].__setitem__(3, 9), "tokens[3]: 8 and 9"),
        (
            lambda s: s["rollout_log_probs"].__setitem__(1, float(np.nextafter(-9.25, 0))),
            "rollout_log_probs[1]: -9.25 and -9.249999999999998",
        ),
        (lambda s: s.update(reward=0.0), "reward: 1.0 and 0.0"),
        (lambda s: s["version_spans"].__setitem__(0, [0, "2"]), 'version_spans[0][1]: "3" and "2"'),
    ],
    ids=["token", "log-prob", "reward", "version"],
)
def test_one_changed_sample_is_named_with_step_and_number(tmp_path, runs, change, wanted):
    edit_sample(runs[1][-1], 2, change)
    found = differences(tmp_path, runs, "--deterministic-mode")
    assert found[compare.SAMPLES] == f"step 2, sample 9 (group 4): sample.{wanted}"
    assert differences(tmp_path, runs) == {}


def test_what_only_tells_how_a_sample_was_computed_does_not_count(tmp_path, runs):
    edit_sample(runs[1][-1], 2, lambda s: s.update(cached_tokens=99))
    assert differences(tmp_path, runs, "--deterministic-mode") == {}


def test_samples_of_the_part_before_the_kill_count_too(tmp_path, runs):
    edit_sample(runs[1][0], 0, lambda s: s["tokens"].append(3))
    found = differences(tmp_path, runs, "--deterministic-mode")
    assert found == {compare.SAMPLES: "step 0, sample 1 (group 0): sample.tokens: 4 and 5 entries"}


@MODES
@pytest.mark.parametrize("part", ["issued", "live", "offset", "version"])
def test_one_changed_count_of_ledger_data_or_versions_is_named(tmp_path, runs, flags, part):
    def change(state):
        ledger = state["rollout"]["ledger"]
        if part == "issued":
            ledger["issued"] += 1
        if part == "live":
            ledger["live"]["partial"].append(6)
        if part == "offset":
            state["rollout"]["data_source"]["offset"] = 5
        if part == "version":
            state["weight_version"] = 4

    edit_json(last(runs[1][-1]) / "state.json", change)
    found = differences(tmp_path, runs, *flags)
    (text,) = found.values()
    wanted = {
        "issued": "issued: 6 and 7",
        "live": "live.partial: 0 and 1 entries",
        "offset": "offset: 6 and 5",
        "version": "weight_version: 3 and 4",
    }
    assert text.endswith(wanted[part])


def test_a_group_that_is_trained_on_twice_is_named(tmp_path, runs):
    edit_sample(runs[1][-1], 2, lambda s: s.update(group_index=1))
    found = differences(tmp_path, runs)
    assert found[compare.ACCOUNTS] == "group 1 was trained on in step 0 and in step 2"


def test_a_prompt_that_changed_is_named(tmp_path, runs):
    edit_sample(runs[1][-1], 2, lambda s: s["tokens"].__setitem__(0, 1))
    found = differences(tmp_path, runs)
    assert list(found) == [compare.PROMPTS]
    assert found[compare.PROMPTS].startswith("step 2: ")


def test_where_sampling_decides_what_is_trained_on_only_sums_are_compared(tmp_path, runs):
    edit_sample(runs[1][-1], 2, lambda s: s["tokens"].__setitem__(0, 1))
    assert differences(tmp_path, runs, "--over-sampling-batch-size", "64") == {}
    edit_json(last(runs[1][-1]) / "state.json", lambda s: s["rollout"]["ledger"].update(trained=5))
    found = differences(tmp_path, runs, "--over-sampling-batch-size", "64")
    assert found == {
        compare.ACCOUNTS: "the ledger says 5, the batches hold 6",
        "ledger: groups trained": "6 and 5",
    }


@MODES
def test_an_evaluation_that_was_lost_with_the_run_is_named(tmp_path, runs, flags):
    (runs[1][0].run_dir / "eval" / "held" / "0000001.jsonl").unlink()
    assert differences(tmp_path, runs, *flags) == {compare.EVALUATIONS: "held/0000001.jsonl: was never evaluated"}


def test_values_of_an_evaluation_are_compared_bit_for_bit_in_deterministic_mode(tmp_path, runs):
    file = runs[1][0].run_dir / "eval" / "held" / "0000001.jsonl"
    lines(file, [{"sample_index": i, "reward": 0.5 if i else 0.25} for i in range(4)])
    assert differences(tmp_path, runs) == {}
    found = differences(tmp_path, runs, "--deterministic-mode")
    assert found == {compare.EVALUATIONS: "held/0000001.jsonl: line [0].reward: 0.5 and 0.25"}


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a[1].b: 2 and 3"),
        ({"a": 1}, {"a": 1, "b": 2}, "b: only in one of the two"),
        ([1, 2], [1, 2, 3], "2 and 3 entries"),
        (0.0, -0.0, "0.0 and -0.0"),
        (float("nan"), float("nan"), None),
        (1, True, "1 and true"),
        ("x" * 99, "y", f'"{"x" * 56}... and "y"'),
    ],
)
def test_the_first_difference_of_two_values_is_named(a, b, difference):
    assert compare.first_difference(a, b) == difference


def test_tensors_are_compared_by_their_bits(tmp_path):
    nan = torch.tensor([1.0, float("nan")])
    for name, value in (("a", nan), ("b", nan.clone()), ("c", torch.tensor([1.0, 2.0])), ("d", torch.zeros(2, 1))):
        save_file({"x": value}, tmp_path / name)
    assert tensors.difference(tmp_path / "a", tmp_path / "b") == (1, None)
    _, text = tensors.difference(tmp_path / "a", tmp_path / "c")
    assert text is not None
    assert "x: 1 of 2 values differ, first at [1]" in text
    _, text = tensors.difference(tmp_path / "a", tmp_path / "d")
    assert text is not None
    assert "[2]" in text


def test_the_table_says_ok_or_how_a_thing_differs():
    text = table([compare.Finding("ledger", 3, "checkpoints"), compare.Finding("samples", 9, "samples", "step 2: x")])
    assert text.splitlines() == [
        "  ledger        3 checkpoints  OK",
        "  samples       9 samples      DIFFERS",
        "      step 2: x",
    ]


# ---- the moments


def test_a_seed_gives_the_same_moments_and_seeds_differ():
    points = [draw(config(), range(5), 2, seed) for seed in range(40)]
    assert points == [draw(config(), range(5), 2, seed) for seed in range(40)]
    drawn = [p for pair in points for p in pair]
    assert {p.phase for p in drawn} == {"generate", "train", "save", "publish", "evaluate"}
    assert all(p.phase in ("generate", "train") for p in drawn if p.step == 4)
    assert all(p.step in (1, 3) for p in drawn if p.phase == "evaluate")


def test_only_phases_that_a_step_has_are_chosen():
    assert phases_of(config(), 0, STEPS) == ["generate", "train", "save", "publish"]
    assert phases_of(config(), 1, STEPS) == ["generate", "train", "save", "publish", "evaluate"]
    assert phases_of(config(), 2, STEPS)[-1] == "evaluate"  # after the last step


def test_moments_are_told_from_what_a_run_has_written(tmp_path):
    point = KillPoint.at(1, "publish", 0.5)
    assert not begun(tmp_path, point)
    lines(tmp_path / "events.jsonl", [{"event": "run"}, {"event": "phase", "phase": "publish", "step": 1}])
    assert begun(tmp_path, point)
    assert not begun(tmp_path, KillPoint.at(2, "publish", 0.5))
    assert not begun(tmp_path, KillPoint.at(1, "save", 0.5))
    lines(tmp_path / "metrics.jsonl", [{"step": 1, "perf/train_time": 0.5}, {"step": 1, "perf/save_time": 0.25}])
    assert begun(tmp_path, KillPoint.at(1, "save", 0.5))
    assert seconds_of(tmp_path, KillPoint.at(1, "save", 0.5)) == 0.25
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "pha')
    assert begun(tmp_path, point)  # a line that is being written is left alone


# ---- the command line


def files(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    save_file({"w": torch.zeros(1)}, model / "model.safetensors")
    lines(tmp_path / "data.jsonl", [{"input": "1", "label": "1"}])
    return ["--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "data.jsonl"), "--num-cpus", "4",
            "--rollout-max-response-len", "8", "--out", str(tmp_path / "out")]  # fmt: skip


def test_flags_of_the_verb_are_taken_out_and_the_run_saves_after_every_step(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rollout: {num_rollout: 9}\nreward: {rm_type: exact}\ndata: {label_key: label}\n")
    common = [str(recipe), *files(tmp_path), "--save-interval", "24", "--lr", "1e-4"]
    found = read_options([*common, "--at", "2.save:0.25", "--at", "1.train", "--steps", "3", "--json", "x.json"])
    assert [str(p) for p in found.points] == ["1.train:0.5", "2.save:0.25"]
    assert found.argv[0] == str(recipe)
    assert not {"--at", "--steps", "--json", "--out"} & set(found.argv)
    final = load(found.argv)
    assert (final.checkpoint.save_interval, final.rollout.num_rollout, final.optimizer.lr) == (1, 3, 1e-4)
    assert (found.steps, found.keep, found.json_path) == (range(3), True, Path("x.json"))
    assert read_options([*common, "--kills", "3"]).steps == range(4)
    assert len(read_options([*common, "--kills", "3"]).points) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "1"], "1 leaves nothing to resume"),
        (["--steps", "two"], "got two"),
        (["--at", "1.sleep"], "'1.sleep' is no moment"),
        (["--at", "7.train"], "it has steps 0 to 2"),
        (["--at", "1.evaluate"], "phases generate, train, save, publish,"),
        (["--at", "1.train:2"], "parts from 0 to 1"),
    ],
)
def test_a_wrong_flag_of_the_verb_is_named_with_the_way_out(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        read_options([*RUN, *files(tmp_path), *flags])


def test_help_and_mistakes_answer_without_loading_torch_or_ray(tmp_path):
    code = (
        "import sys; from miles.verify_resume.main import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as e: status = e.code\n"
        "print(status, sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    for argv, status, words in ((["--help"], "0", "--kill-seed"), ([str(tmp_path / "no.yaml")], "2", "no such file")):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == f"{status} []", done.stderr
        assert words in done.stdout + done.stderr


def test_a_wrong_flag_ends_with_status_2(tmp_path, capsys):
    assert main([*RUN, *files(tmp_path), "--steps", "1"]) == 2
    assert "--steps: 1 leaves nothing to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "made"),
    [(range(5), [-1]), (range(1, 5), []), (range(2, 5), [1]), (range(3, 5), [])],
)
def test_an_evaluation_that_may_have_been_cut_off_is_made_again_by_the_run_that_resumes_there(steps, made):
    found: list[int] = []

    class Rollout:
        async def evaluate(self, step):
            found.append(step)
            return {}

    class Tracker:
        def log(self, step, metrics): ...

    evaluation: Any = IntervalEvaluation(Rollout(), Tracker(), steps, 2, before=True)  # pyright: ignore
    asyncio.run(evaluation.before_training())
    assert found == made


def test_a_line_separator_inside_a_sample_ends_no_line(tmp_path):
    file = tmp_path / "0.jsonl"
    file.write_text('{"header": 1}\n{"response": "a\u2028b"}\n', encoding="utf-8")
    assert compare.read_samples(file) == [{"response": "a\u2028b"}]
