"""What `miles doctor loss` allows for rounding is rounding: computed in float64, nothing of it is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles.config.dump import dump
from miles.config.load import load
from miles.doctor.main import compare
from miles.doctor.ranks import CONFIG, RESULT, TASK
from miles.doctor.variations import VARIATIONS

ROOT = Path(__file__).parents[3]
RUN = ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
RUN += ["--rm-type", "exact", "--label-key", "label"]
SEQUENCES = ["--advantage-estimator", "gspo", "--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01"]
MORE = {
    "token ratios": [],
    "critic": ["--advantage-estimator", "ppo"],
    "whitened": ["--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"],
    "geometric means, rejection": ["--advantage-estimator", "gmpo", "--correction-preset", "mis"],
}
LEFT = 1e-12
"""Some 20 times the unit roundoff of float64, 1.1e-16, is measured; 20 times that of float32 is the 1e-6 of a usual run."""


def rows(flags, tmp_path):
    config = load([*RUN, *flags])
    (tmp_path / CONFIG).write_text(dump(config))
    (tmp_path / TASK).write_text(json.dumps({"seed": 0, "max_parameters": 0}))
    command = [sys.executable, "-m", "tests.fast.fsdp.double_doctor", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return compare(config, json.loads((tmp_path / RESULT).read_text())["rows"])


def assert_nothing_is_left(found):
    assert [row.name for row in found] == [variation.name for variation in VARIATIONS]
    for row in found:
        assert row.loss is not None
        assert row.gradient is not None
        assert row.direction is not None
        assert max(row.loss, row.gradient, row.direction) <= LEFT, row
    assert max(row.direction for row in found) > 0  # the work was split indeed


def test_in_float64_nothing_depends_on_how_the_work_is_split(tmp_path):
    assert_nothing_is_left(rows([*SEQUENCES, "--use-tis"], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_in_float64_nothing_depends_on_the_split_of_other_losses_either(name, tmp_path):
    assert_nothing_is_left(rows(MORE[name], tmp_path))
