import pytest
import torch

from miles.backends.training_utils.loss_hub.records import LossOutput
from miles.backends.training_utils.lr_schedule import learning_rate
from miles.backends.training_utils.metrics import StepMetrics, mean_over_steps
from miles.config.schema import OptimizerConfig


def output(loss, tokens, clipped, ratios):
    return LossOutput(
        loss=torch.tensor(loss),
        weighted={"pg_loss": torch.tensor(loss)},
        token_sums={"clipfrac": torch.tensor(clipped)},
        maxima={"ratio_max": torch.tensor(ratios)},
        num_tokens=tokens,
    )


def test_token_means_are_sum_over_count_not_mean_of_means():
    metrics = StepMetrics()
    metrics.add(output(0.5, 1, 1.0, [1.5]))
    metrics.add(output(0.25, 9, 0.0, [1.1, 3.0]))
    metrics.add(output(0.0, 0, 0.0, []))
    assert metrics.reduce() == {
        "loss": 0.75,
        "pg_loss": 0.75,
        "clipfrac": pytest.approx(0.1),
        "ratio_max": 3.0,
        "trainable_tokens": 10,
    }


def test_shares_are_divided_by_their_own_count_and_numbers_add_up():
    metrics = StepMetrics()
    for value, count, dropped in ((1.5, 2.0, 1), (0.5, 1.0, 0)):
        metrics.add(
            LossOutput(
                loss=torch.tensor(0.0),
                shares={
                    "ess_ratio": (torch.tensor(value), torch.tensor(count)),
                    "none": (torch.zeros(()), torch.zeros(())),
                },
                counts={"dropped_tokens": dropped},
                num_tokens=4,
            )
        )
    found = metrics.reduce()
    assert found["ess_ratio"] == pytest.approx(2 / 3)
    assert found["dropped_tokens"] == 1
    assert "none" not in found


def test_steps_are_averaged_maxima_kept_and_tokens_added():
    steps = [{"loss": 1.0, "ratio_max": 2.0, "trainable_tokens": 3.0}, {"loss": 3.0, "trainable_tokens": 0.0}]
    assert mean_over_steps(steps) == {"loss": 2.0, "ratio_max": 2.0, "trainable_tokens": 3.0}
    assert mean_over_steps([]) == {}


def test_constant_rate_after_a_warm_up_whose_first_step_trains():
    config = OptimizerConfig(lr=1.0, lr_warmup_iters=4)
    assert [learning_rate(config, k, 100) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_least_rate():
    config = OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_warmup_iters=2)
    rates = [learning_rate(config, k, 6) for k in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_passes_the_middle_half_way_and_can_end_early():
    config = OptimizerConfig(lr=1.0, lr_decay_style="cosine", lr_decay_iters=10)
    assert learning_rate(config, 0, 1000) == 1.0
    assert learning_rate(config, 5, 1000) == pytest.approx(0.5)
    assert learning_rate(config, 10, 1000) == learning_rate(config, 999, 1000) == pytest.approx(0)
