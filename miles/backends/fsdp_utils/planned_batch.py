"""A batch cut into optimizer steps and this rank's micro-batches."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.fsdp_utils.roles import Roles
from miles.backends.training_utils.packing import FlatBatch, MicroBatch
from miles.backends.training_utils.policy_columns import numbers
from miles.backends.training_utils.schedule import StepPlan, plan_steps
from miles.config.batch_math import batch_plan
from miles.config.schema import RunConfig
from miles.core.train_batch import TrainBatch
from miles.errors import TrainingError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBatch:
    """What every part of a training step is handed. The batch and its plans are the same on all ranks."""

    batch: TrainBatch
    packed: FlatBatch
    plans: Sequence[StepPlan]
    """Who does what, for each optimizer step."""
    steps: Sequence[Sequence[MicroBatch]]
    """This rank's micro-batches of each optimizer step, on its device."""
    step: int
    """The rollout that the batch is of."""

    @property
    def parts(self) -> list[MicroBatch]:
        """This rank's micro-batches of all optimizer steps."""
        return [part for parts in self.steps for part in parts]

    @property
    def trajectory_R(self) -> Tensor:
        """The trajectory of each response token."""
        return numbers(self.batch, "trajectory")[torch.from_numpy(self.packed.sample_of_R)]

    def entries(self, plan: StepPlan) -> NDArray[np.int64]:
        """Places on the response axis of all trainable tokens of an optimizer step."""
        trainable = self.packed.trainable
        return trainable[np.isin(self.packed.sample_of_R[trainable], plan.samples)]


def plan_batch(
    config: RunConfig,
    batch: TrainBatch,
    packed: FlatBatch,
    *,
    balance_cost_B: NDArray[np.float64] | None,
    rank: int,
    world_size: int,
    device: torch.device,
    step: int,
) -> PlannedBatch:
    """Cut a checked batch. Raises TrainingError when it cannot be cut as the settings ask."""
    plans = plan_steps(
        numbers(batch, "trajectory").numpy(),
        packed.total_lengths_B,
        packed.trainable_B,
        global_batch_size=config.train.global_batch_size,
        num_steps=config.train.num_steps_per_rollout,
        world_size=world_size,
        max_tokens=config.train.max_tokens_per_gpu,
        allow_partial=config.train.allow_partial_train_step,
        dynamic=config.train.use_dynamic_global_batch_size,
        balance_cost_B=balance_cost_B,
    )
    if config.algorithm.skip_actor_forward_only and len(plans) > batch_plan(config).num_steps_per_rollout:
        raise TrainingError(
            f"step {step}: the batch makes {len(plans)} optimizer steps, and --skip-actor-forward-only takes the weights "
            "that are trained for those that sampled, which is true of the first alone"
            "\n    fix: --use-dynamic-global-batch-size in place of --global-batch-size, or leave out "
            "--skip-actor-forward-only"
        )
    steps = [[packed.micro_batch(part).to(device) for part in plan.micro_batches[rank]] for plan in plans]
    return PlannedBatch(batch=batch, packed=packed, plans=plans, steps=steps, step=step)


def balance_cost(config: RunConfig, roles: Roles, lengths_B: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """What ranks are to have equally much of; None deals micro-batches in turn."""
    if config.train.balance_by_flops:
        # Policy and critic make the same passes: one over old weights, and one with gradient for every step.
        flops = roles.policy.flops
        return (flops if roles.critic is None else flops + roles.critic.flops)(lengths_B)
    return lengths_B.astype(np.float64) if config.train.balance_data else None


__all__ = ["PlannedBatch", "balance_cost", "plan_batch"]
