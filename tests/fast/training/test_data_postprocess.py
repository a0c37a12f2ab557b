from dataclasses import replace

import pytest
import torch

from miles.backends.training_utils.advantages import AdvantageInputs
from miles.backends.training_utils.data_postprocess import DataPostprocess
from miles.errors import HookError

INPUTS = AdvantageInputs(
    rewards_B=torch.tensor([1.0, 0.0]),
    trajectory_B=torch.tensor([0, 1]),
    group_B=torch.tensor([0, 0]),
    sample_index_B=torch.tensor([70, 71]),
    sample_of_R=torch.tensor([0, 0, 1, 1, 1]),
    mask_R=torch.tensor([1.0, 1, 1, 0, 1]),
)
COLUMNS = {"log_probs": torch.tensor([-0.1, -9.0, -0.2, -0.3, -0.4])}


def after(fn, inputs=INPUTS):
    return DataPostprocess(fn=fn, args="args", path="my.fn")(inputs, COLUMNS)


def test_a_function_may_set_rewards_and_clear_tokens_by_what_the_trainer_found():
    def fn(args, rollout_data):
        assert args == "args"
        assert rollout_data["sample_indices"] == [70, 71]
        rollout_data["rewards"][1] = 0.5
        for mask, logprobs in zip(rollout_data["loss_masks"], rollout_data["log_probs"], strict=True):
            mask[logprobs < -5] = 0

    found = after(fn)
    assert found.rewards_B.tolist() == [1.0, 0.5]
    assert found.mask_R.tolist() == [1, 0, 1, 0, 1]
    assert INPUTS.mask_R.tolist() == [1, 1, 1, 0, 1]


def test_a_function_that_changes_nothing_changes_nothing():
    found = after(lambda args, rollout_data: None)
    assert torch.equal(found.rewards_B, INPUTS.rewards_B)
    assert torch.equal(found.mask_R, INPUTS.mask_R)


def broken_rewards(args, rollout_data):
    rollout_data["rewards"] = ["good", 1]


def nan_reward(args, rollout_data):
    rollout_data["rewards"][1] = float("nan")


def too_few(args, rollout_data):
    rollout_data["rewards"].pop()


def unmasks(args, rollout_data):
    rollout_data["loss_masks"][1][1] = 1


def shortens(args, rollout_data):
    rollout_data["loss_masks"][0] = rollout_data["loss_masks"][0][:1]


def raises(args, rollout_data):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (broken_rewards, "rewards that are not numbers"),
        (nan_reward, "set reward nan for sample 71"),
        (too_few, "left 1 rewards for 2 samples"),
        (unmasks, "a token of sample 71 that was masked"),
        (shortens, "other lengths than the responses'"),
        (raises, "failed with KeyError"),
    ],
)
def test_what_a_function_may_not_do_is_told_with_its_name(fn, told):
    with pytest.raises(HookError, match=told) as error:
        after(fn, replace(INPUTS))
    assert "my.fn" in str(error.value)
