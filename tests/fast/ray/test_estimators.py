"""Every estimator is one line over the quickstart's recipe: the lines of docs/algorithms.md, as whole runs of two steps."""

import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from miles.config.dump import undump
from miles.config.estimators import ESTIMATORS
from miles.config.load import load
from tests.ci.register import register_cpu_ci
from tests.fast.ray.conftest import ROOT, TrainProcess, metrics

register_cpu_ci(est_time=60, suite="stage-a-cpu")
register_cpu_ci(est_time=160, suite="stage-b-cpu")

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("| variant | line |") :].split("\n\n")[0]
LINES = dict(re.findall(r"^\| (.+?) \| `(.+)` \|$", TABLE, flags=re.MULTILINE))
"""Variant -> its line."""
WITH_PARTS_OF_THEIR_OWN = ("GRPO", "PPO", "your own")
"""Variants that run through other code than the others do: nothing more, a critic, the user's function."""
RECIPE = str(ROOT / "recipes" / "quickstart-grpo.yaml")
AND_NOTES = """

of_the_page = advantages


def advantages(args, rollout_data):
    with open(f"{args.run_dir}/noted.txt", "a") as file:
        file.write(f"from step {args.start_rollout_id}\\n")
    of_the_page(args, rollout_data)
"""
"""After the page's example of an own function: it notes in the run's folder that it was called."""
AT_ONCE = 2
"""Runs at a time: half of a start is waiting."""


async def reward_digits(args, sample, **kwargs):
    """Dense enough that an untrained model gets different rewards."""
    return sum(c.isdigit() for c in sample.response) / 6


class Runs:
    """Starts the runs of the tests to come, a few ahead of the one that is waited for."""

    def __init__(self, names, task, folder) -> None:
        self._names, self._task, self.folder = names, task, folder
        self._started = {}
        example = PAGE[PAGE.index("### Your own: `--custom-advantage") :].split("```python\n", 1)[1]
        (folder / "my_advantages.py").write_text(example.split("```", 1)[0] + AND_NOTES)

    def outcome(self, name):
        place = self._names.index(name)
        for ahead in self._names[place : place + AT_ONCE]:
            if ahead not in self._started:
                self._started[ahead] = TrainProcess(*self._flags(ahead), modules=self.folder)
        return self._started[name].end()

    def run_dir(self, name) -> Path:
        return self.folder / f"run-{self._names.index(name)}"

    def end(self):
        for started in self._started.values():
            if started.process.poll() is None:
                started.process.terminate()
                started.end()

    def _flags(self, name):
        line = self.folder / f"{self._names.index(name)}.yaml"
        line.write_text(LINES[name])
        return [
            RECIPE, str(line), "--hf-checkpoint", str(self._task / "model"),
            "--prompt-data", str(self._task / "train.jsonl"), "--run-dir", str(self.run_dir(name)),
            "--custom-rm-path", f"{__name__}.reward_digits", "--num-rollout", "2", "--rollout-batch-size", "4",
            "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6", "--eval-interval", "null",
            "--save-interval", "2", "--torch-threads", "1", "--run.use-tensorboard", "false",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(request, task, tmp_path_factory):
    mine = [i for i in request.session.items if i.module is request.module and "runs" in i.fixturenames]
    asked_for = [item.callspec.params["name"] for item in mine]
    found = Runs(asked_for, task, tmp_path_factory.mktemp("estimators"))
    yield found
    found.end()


def algorithm_of(name, folder):
    """The section that a variant's line makes of the recipe."""
    (folder / "line.yaml").write_text(LINES[name])
    return load([RECIPE, str(folder / "line.yaml"), "--eval-interval", "null"]).algorithm


def test_the_page_has_a_line_for_every_estimator_and_variant(tmp_path):
    found = [algorithm_of(name, tmp_path) for name in LINES]
    assert {algorithm.advantage_estimator for algorithm in found} == set(ESTIMATORS)
    assert {a.grpo_std_normalization for a in found if a.advantage_estimator == "grpo"} == {True, False}
    assert {a.dppo_divergence for a in found if a.advantage_estimator == "dppo"} == {"tv", "kl"}
    assert any(algorithm.custom_advantage_function_path for algorithm in found)
    assert len({algorithm.model_dump_json() for algorithm in found}) == len(LINES) == 15


@pytest.mark.parametrize(
    "name", [n if n in WITH_PARTS_OF_THEIR_OWN else pytest.param(n, marks=pytest.mark.slow) for n in LINES]
)
def test_an_estimator_is_one_line_over_the_quickstart_and_trains(runs, task, name, tmp_path):
    ended = runs.outcome(name)
    assert ended.status == 0, ended.err
    assert ended.left_behind == []
    run_dir = runs.run_dir(name)
    assert undump((run_dir / "resolved.yaml").read_text()).algorithm == algorithm_of(name, tmp_path)
    steps = [row for row in metrics(run_dir) if "train/loss" in row]
    assert [row["step"] for row in steps] == [0, 1]
    assert [row["train/optimizer_steps"] for row in steps] == [4, 8]
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/skipped_steps"] == row["train/empty_steps"] == 0
        assert row["train/grad_norm"] > 0
        assert row["rollout/zero_std"] < 1
    if name == "your own":
        assert (run_dir / "noted.txt").read_text() == "from step 0\n" * 2
    before = load_file(task / "model" / "model.safetensors")
    after = load_file(run_dir / "checkpoints" / "iter_0000002" / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = max(float((after[tensor] - before[tensor]).abs().max()) for tensor in before)
    assert 1e-5 < moved < 1
