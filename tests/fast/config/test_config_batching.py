import pytest

from miles.config.batch_math import batch_plan
from miles.config.load import load, read
from miles.config.schema import RolloutConfig, RunConfig, TrainConfig

OK = ["--num-rollout", "3", "--rm-type", "math", "--label-key", "label"]
DYNAMIC, PARTIAL = "--use-dynamic-global-batch-size", "--allow-partial-train-step"


def problems(*argv):
    return [f"{issue.path}: {issue.problem} -> {issue.fix}" for issue in read([*OK, *argv]).issues]


def plan(**train):
    return batch_plan(
        RunConfig(rollout=RolloutConfig(batch_size=5, n_samples_per_prompt=8), train=TrainConfig(**train))
    )


def test_a_partial_last_step_counts_as_a_step():
    found = plan(global_batch_size=16, allow_partial_train_step=True)
    assert (found.global_batch_size, found.num_steps_per_rollout) == (16, 3)
    assert found.describe() == ("5 prompts x 8 samples = 40 samples a rollout = 3 optimizer steps x up to 16 samples")
    assert plan(global_batch_size=64, allow_partial_train_step=True).num_steps_per_rollout == 1
    assert plan(global_batch_size=20, allow_partial_train_step=True).is_even


def test_steps_of_a_dynamic_size_take_what_there_is():
    found = plan(num_steps_per_rollout=3, use_dynamic_global_batch_size=True)
    assert (found.global_batch_size, found.num_steps_per_rollout) == (14, 3)
    assert plan(use_dynamic_global_batch_size=True).num_steps_per_rollout == 1


def test_sound_batching_settings_pass():
    assert problems(DYNAMIC, "--num-steps-per-rollout", "3", "--train-ranks", "3") == []
    assert problems(PARTIAL, "--global-batch-size", "100", "--train-ranks", "3") == []
    assert problems("--balance-data", "--train-ranks", "2") == []
    cfg = load([*OK, "--balance-by-flops"])
    assert (cfg.train.balance_data, cfg.train.balance_by_flops) == (False, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((DYNAMIC, "--global-batch-size", "64"), "but --global-batch-size 64 fixes it -> give only one of the two"),
        ((PARTIAL,), "has no effect without --global-batch-size"),
        (("--balance-data", "--balance-by-flops"), "not both -> --balance-by-flops alone"),
        (
            (PARTIAL, "--global-batch-size", "100", "--num-steps-per-rollout", "2"),
            "but 100 samples x 2 steps = 200 -> --global-batch-size 128, or give only one",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_way_out(argv, message):
    (found,) = problems(*argv)
    assert message in found
