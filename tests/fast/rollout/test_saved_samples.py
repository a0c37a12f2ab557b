import asyncio
import json

import numpy as np
import pytest

from miles.core.samples import Sample
from miles.errors import DataError
from miles.rollout.base_types import RolloutFnTrainInput
from miles.rollout.saved_samples import SavedSamplesRolloutFn, load_groups, save_groups
from miles.rollout.train_data_conversion import to_train_batch


def sample(index, **more):
    return Sample(
        group_index=7 if index < 10 else 8,
        index=index,
        prompt=[{"role": "user", "content": "wie groß?"}],
        tokens=[1, 2, 3, 4],
        response="x\u2028y",
        response_length=2,
        reward=index / 3,
        rollout_log_probs=[-0.1, -1 / 3],
        version_spans=[(0, "1"), (1, "2")],
        status=Sample.Status.TRUNCATED,
        metadata={"a": [1, None]},
        **more,
    )


def groups():
    return [[sample(1, loss_mask=[0, 1]), sample(2)], [], [sample(11), [sample(12, rollout_id=5), sample(13)]]]


def test_saved_groups_come_back_equal_in_samples_and_structure(tmp_path):
    path = tmp_path / "new" / "3.jsonl"
    save_groups(str(path), 3, groups())
    assert load_groups(str(path), 3) == groups()
    assert [p.name for p in path.parent.iterdir()] == ["3.jsonl"]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert lines[0] == {"format": 1, "kind": "rollout samples", "rollout_id": 3, "groups": 3, "samples": 5}
    assert [line["at"] for line in lines[1:]] == [[0, 0], [0, 1], [2, 0], [2, 1, 0], [2, 1, 1]]


def test_a_batch_that_cannot_be_trained_on_can_be_saved_and_fails_again_when_loaded(tmp_path):
    path = str(tmp_path / "0.jsonl")
    broken = [[sample(1), sample(2)]]
    broken[0][0].reward = float("nan")
    save_groups(path, 0, broken)
    with pytest.raises(Exception, match="the reward is nan"):
        to_train_batch(load_groups(path, 0))


def test_numpy_numbers_are_saved_and_other_objects_are_told(tmp_path):
    path = str(tmp_path / "0.jsonl")
    odd = sample(1)
    odd.reward, odd.metadata = np.float32(0.5), {"image": np.arange(3)}
    save_groups(path, 0, [[odd]])
    assert load_groups(path, 0)[0][0].metadata == {"image": [0, 1, 2]}
    odd.metadata = {"seen": {1}}
    with pytest.raises(DataError, match=r"saved as JSON: set \{1\}(.|\n)*hooks"):
        save_groups(path, 0, [[odd]])


def test_a_path_that_cannot_be_written_is_told_with_its_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: .*\n.*--save-debug-rollout-data"):
        save_groups(str(tmp_path / "file" / "0.jsonl"), 0, [])


def test_the_rollout_function_reads_the_file_of_its_step(tmp_path):
    for step in (0, 1):
        save_groups(str(tmp_path / f"{step}.jsonl"), step, groups()[: step + 1])
    fn = SavedSamplesRolloutFn(str(tmp_path / "{rollout_id}.jsonl"))
    assert asyncio.run(fn(RolloutFnTrainInput(1))).samples == groups()[:2]
    with pytest.raises(DataError, match=r"2\.jsonl: cannot be read"):
        asyncio.run(fn(RolloutFnTrainInput(2)))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda lines: lines[1:], r":1: is no file of saved samples in format 1"),
        (lambda lines: [lines[0].replace('"format": 1', '"format": 2'), *lines[1:]], r":1: is no file of saved"),
        (lambda lines: [], r":1: is no file of saved samples"),
        (lambda lines: lines[:-1], r"holds 4 samples, and its first line promises 5"),
        (lambda lines: [*lines[:-1], lines[-1][:40]], r":6: is not JSON"),
        (lambda lines: [lines[0], lines[1].replace('"label"', '"lable"')], r":2: is no saved sample: .*lable"),
        (lambda lines: [lines[0], lines[1].replace("[0, 0]", "[9, 0]")], r":2: is no saved sample: IndexError"),
    ],
)
def test_a_file_that_is_not_what_was_saved_is_refused_with_its_line(tmp_path, damage, told):
    path = tmp_path / "0.jsonl"
    save_groups(str(path), 0, groups())
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    path.write_text("".join(line + "\n" for line in damage(lines)), encoding="utf-8")
    with pytest.raises(DataError, match=told):
        load_groups(str(path), 0)


def test_the_samples_of_another_step_are_refused(tmp_path):
    save_groups(str(tmp_path / "0.jsonl"), 4, groups())
    with pytest.raises(DataError, match="holds the samples of step 4, and this is step 0"):
        load_groups(str(tmp_path / "0.jsonl"), 0)
