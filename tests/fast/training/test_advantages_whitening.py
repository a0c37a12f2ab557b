import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils.advantages import whiten
from miles.errors import TrainingError
from tests.fast.training.whiten_ranks import CUTS, values_and_mask

ROOT = Path(__file__).resolve().parents[3]


def reference(values, mask):
    kept = [v for v, m in zip(values.tolist(), mask.tolist(), strict=True) if m]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / max(len(kept) - 1, 1)
    return [
        (v - mean) / (variance + 1e-8) ** 0.5 if m else 0.0
        for v, m in zip(values.tolist(), mask.tolist(), strict=True)
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whiten")
    command = [sys.executable, "-m", "tests.fast.training.whiten_ranks", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


def test_golden_numbers():
    got = whiten(torch.tensor([1.0, 2.0, 9.0, 3.0], dtype=torch.float64), torch.tensor([1, 1, 0, 1]))
    torch.testing.assert_close(got, torch.tensor([-1.0, 0.0, 0.0, 1.0], dtype=torch.float64), atol=1e-7, rtol=0)


def test_values_are_distances_from_the_mean_in_deviations_and_masked_ones_are_not_read():
    values, mask = values_and_mask()
    torch.testing.assert_close(whiten(values, mask).tolist(), reference(values, mask), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_and_a_single_one_give_exactly_zero(size, value, dtype):
    assert whiten(torch.full((size,), value, dtype=dtype), torch.ones(size)).tolist() == [0.0] * size


def test_a_batch_without_a_trainable_token_is_an_error():
    with pytest.raises(TrainingError, match=r"no token of the whole batch is trainable.*\n.*fix: .*loss_mask"):
        whiten(torch.ones(3), torch.zeros(3))


# Case B09: at cut 0 and at cut 10 one rank has no token.
# Case B33.
@pytest.mark.parametrize("cut", CUTS)
def test_the_result_does_not_depend_on_which_rank_has_which_tokens(ranks, cut):
    both = ranks[0][f"cut {cut}"] + ranks[1][f"cut {cut}"]
    assert (len(ranks[0][f"cut {cut}"]), len(both)) == (cut, 10)
    torch.testing.assert_close(both, reference(*values_and_mask()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_equal_values_on_several_ranks_give_exactly_zero(ranks, dtype):
    assert (ranks[0][f"equal {dtype}"], ranks[1][f"equal {dtype}"]) == ([0.0], [0.0, 0.0])


def test_every_rank_is_told_that_no_rank_has_a_trainable_token(ranks):
    assert ranks[0]["masked"] == ranks[1]["masked"]
    assert "no token of the whole batch is trainable" in ranks[0]["masked"]


# Case B10.
def test_a_group_of_one_rank_waits_for_no_other(ranks):
    assert "alone" not in ranks[0]
    torch.testing.assert_close(ranks[1]["alone"], reference(*values_and_mask()), rtol=1e-9, atol=1e-12)
