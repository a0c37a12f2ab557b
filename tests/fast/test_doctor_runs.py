import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from miles.config.dump import dump
from miles.config.load import load
from miles.doctor.main import compare, main
from miles.doctor.ranks import CONFIG, RESULT, TASK
from tests.ci.register import register_cpu_ci

register_cpu_ci(est_time=45, suite="stage-a-cpu")

ROOT = Path(__file__).parents[2]
REWARD = ["--rm-type", "exact", "--label-key", "label"]
RUN = ["--num-rollout", "2", "--rollout-batch-size", "4", *REWARD, "--n-samples-per-prompt", "4"]
SPLIT = ("micro-batch size: half", "gradient accumulation", "packing: least per pack")
WHOLE = ("order of samples", "trajectory splitting")

BROKEN_DENOMINATOR = """
import sys
from miles.backends.fsdp_utils.policy_steps import PolicySteps
from miles.doctor import ranks

step_inputs = PolicySteps._step_inputs

def over_the_micro_batch(self, *args, **kwargs):
    inputs_of = step_inputs(self, *args, **kwargs)

    def of(number):
        values = inputs_of(number)
        return values | {"weights_N": values["weights_N"] / values["weights_N"].sum()}

    return of

PolicySteps._step_inputs = over_the_micro_batch
ranks.VARIATIONS = [v for v in ranks.VARIATIONS if v.ranks == 1 and v.parts < 3]
sys.exit(ranks.main(sys.argv[1]))
"""


def mean_of_the_micro_batch(args, batch, logits, reducer):
    """The usual mistake: a mean where a sum over the step's denominator belongs."""
    logprobs = torch.log_softmax(logits, -1).gather(1, batch["targets"][:, None]).squeeze(1)
    return -(logprobs * batch["advantages"]).mean(), {}


def children_with(word):
    return [p.pid for p in psutil.Process().children(recursive=True) if any(word in part for part in p.cmdline())]


def test_a_denominator_of_the_micro_batch_fails_in_the_rows_that_split_it(tmp_path):
    config = load(RUN)
    (tmp_path / CONFIG).write_text(dump(config))
    (tmp_path / TASK).write_text(json.dumps({"seed": 0, "max_parameters": 0}))
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_DENOMINATOR, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = compare(config, json.loads((tmp_path / RESULT).read_text())["rows"])
    verdicts = {row.name: row.verdict for row in rows}
    assert verdicts == {SPLIT[0]: "DIFFERS"} | dict.fromkeys(WHOLE, "OK")
    assert rows[0].gradient is not None
    assert rows[0].gradient > 0.1


def test_a_custom_loss_that_takes_the_mean_of_a_micro_batch_is_found_out(tmp_path, capsys):
    hook = f"{__name__}.{mean_of_the_micro_batch.__name__}"
    flags = ["--loss-type", "custom_loss", "--custom-loss-function-path", hook, "--json", str(tmp_path / "out.json")]
    assert main(["loss", *RUN, *flags]) == 1
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    verdicts = {row["name"]: row["verdict"] for row in report["rows"]}
    assert {name for name, verdict in verdicts.items() if verdict == "OK"} == set(WHOLE)
    assert not report["ok"]
    assert f"depends on the split: {SPLIT[0]}; {SPLIT[1]}" in said
    assert "custom_loss" in said
    assert "a tiny qwen3 made here" in said


def test_a_hook_that_cannot_be_loaded_is_named(capsys):
    flags = ["--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}.missing"]
    assert main(["loss", *RUN, *flags]) == 1
    assert f"{__name__}.missing" in capsys.readouterr().err


def test_nothing_is_left_when_time_is_up(capsys):
    assert main(["loss", *RUN, "--timeout", "1"]) == 1
    assert "not done after 1 s" in capsys.readouterr().err
    assert children_with("miles.doctor") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_verb_that_is_ended_leaves_no_process(number, tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    verb = subprocess.Popen(
        [sys.executable, "-m", "miles.cli", "doctor", "loss", *RUN], cwd=ROOT, env=env, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        started = psutil.Process(verb.pid)
        while not started.children(recursive=True):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        ranks = started.children(recursive=True)
        verb.send_signal(number)
        verb.wait(20)
        gone, alive = psutil.wait_procs(ranks, timeout=10)
        assert gone
        assert alive == []
        assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []
    finally:
        verb.kill()
        verb.wait()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*.yaml")))
def test_every_shipped_recipe_passes(recipe, tmp_path, capsys):
    subprocess.run(
        [sys.executable, "examples/quickstart/make_task.py", "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=120
    )
    status = main(["loss", str(ROOT / "recipes" / recipe), "--hf-checkpoint", str(tmp_path / "model")])
    assert status == 0, capsys.readouterr()
