import pytest
import torch

from miles.backends.training_utils.loss_hub.records import LossMetrics, LossOutput
from miles.backends.training_utils.lr_schedule import learning_rate
from miles.backends.training_utils.metrics import StepMetrics, mean_over_steps
from miles.backends.training_utils.packing import FlatBatch
from miles.backends.training_utils.schedule import plan_steps
from miles.config.schema import OptimizerConfig
from miles.core.samples import Sample
from miles.rollout.metrics import rollout_metrics
from miles.rollout.train_data_conversion import to_train_batch


def output(loss, tokens, clipped, ratios):
    found = LossMetrics(
        weighted={"pg_loss": torch.tensor(loss)},
        token_sums={"clipfrac": torch.tensor(clipped)},
        maxima={"ratio_max": torch.tensor(ratios)},
        num_tokens=tokens,
    )
    return LossOutput(torch.tensor(loss), lambda: found)


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
        found = LossMetrics(
            shares={
                "ess_ratio": (torch.tensor(value), torch.tensor(count)),
                "none": (torch.zeros(()), torch.zeros(())),
            },
            counts={"dropped_tokens": dropped},
            num_tokens=4,
        )
        metrics.add(LossOutput(torch.tensor(0.0), lambda found=found: found))
    found = metrics.reduce()
    assert found["ess_ratio"] == pytest.approx(2 / 3)
    assert found["dropped_tokens"] == 1
    assert "none" not in found


# Case H12: rewards and lengths are paired in the whole batch, before ranks have shares of it, and stay paired in these.
def test_correct_samples_have_their_own_lengths_whatever_rank_trains_them():
    rewards, lengths = [1.0, 0.0, 0.0, 1.0], [10, 20, 30, 40]
    samples = [
        Sample(
            group_index=b // 2,
            index=b,
            tokens=list(range(2 + length)),
            response_length=length,
            reward=reward,
            status=Sample.Status.COMPLETED,
        )
        for b, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    groups = [samples[:2], samples[2:]]
    assert rollout_metrics(groups)["rollout/response_len/correct_mean"] == 25
    batch = to_train_batch(groups, baseline=None)
    packed = FlatBatch.from_batch(batch)
    (plan,) = plan_steps(
        batch["trajectory"].values,
        packed.total_lengths_B,
        packed.trainable_B,
        global_batch_size=4,
        num_steps=None,
        world_size=2,
        max_tokens=64,
        balance_cost_B=packed.total_lengths_B.astype(float),
    )
    shares = [[int(b) for part in parts for b in part] for parts in plan.micro_batches]
    assert sorted(b for share in shares for b in share) == [0, 1, 2, 3]
    assert shares != [[0, 1], [2, 3]]
    for share in shares:
        part = batch.select(share)
        assert part["reward"].values.tolist() == [rewards[b] for b in share]
        assert part.response_lengths.tolist() == [lengths[b] for b in share]


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
