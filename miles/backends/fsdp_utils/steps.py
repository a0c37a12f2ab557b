"""One optimizer step from the losses of its micro-batches, and how many may be skipped; the policy's and the critic's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import torch.distributed as dist

from miles.backends.fsdp_utils.optimizer import ShardedAdamW
from miles.backends.training_utils.loss_hub.records import LossOutput
from miles.backends.training_utils.metrics import StepMetrics
from miles.errors import TrainingError

Outcome = Literal["done", "empty", "skipped"]
"""Whether an optimizer step was made, had nothing to train on, or had a loss or a gradient norm that is not finite."""


def optimizer_step(
    optimizer: ShardedAdamW,
    outputs: Iterable[LossOutput],
    lr: float,
    group: dist.ProcessGroup | None,
    before_update: Callable[[], None] | None = None,
) -> tuple[dict[str, float], Outcome]:
    """Go backward through each micro-batch as it comes, and update; returns metrics and what became of the step.

    `before_update` is called when every micro-batch has been gone through and no weight has moved; it may raise.
    No gradients are left. Collective: every rank has as many micro-batches.
    """
    try:
        return _step(optimizer, outputs, lr, group, before_update)
    finally:
        optimizer.zero_grad()


def _step(
    optimizer: ShardedAdamW,
    outputs: Iterable[LossOutput],
    lr: float,
    group: dist.ProcessGroup | None,
    before_update: Callable[[], None] | None,
) -> tuple[dict[str, float], Outcome]:
    totals = StepMetrics()
    for output in outputs:
        # FSDP averages gradients over ranks; the weights already hold the global denominator, so a sum is wanted.
        (output.loss * dist.get_world_size(group)).backward()
        optimizer.add_up()
        totals.add(output)
    found = totals.reduce(group)
    if not found["trainable_tokens"]:
        return found, "empty"
    if before_update is not None:
        before_update()
    found["grad_norm"] = optimizer.clip()
    if not np.isfinite([found["loss"], found["grad_norm"]]).all():
        return found, "skipped"
    optimizer.step(lr)
    return found, "done"


class SkipLimit:
    """Counts optimizer steps in a row that were skipped."""

    def __init__(self, most: int, whose: str = "") -> None:
        """`most` may be skipped in a row; `whose` gradient norm it is, for messages: `the critic's `."""
        self._most, self._whose = most, whose
        self.in_a_row = 0

    def count(self, outcome: Outcome, step: int, grad_norm: float) -> None:
        """Take note of a step of rollout `step`. Raises TrainingError when too many in a row were skipped."""
        if outcome == "done":
            self.in_a_row = 0
        if outcome != "skipped":
            return
        self.in_a_row += 1
        if self.in_a_row > self._most:
            raise TrainingError(
                f"step {step}: {self._whose or 'the '}loss or gradient is not finite (gradient norm {grad_norm}), and "
                f"{self.in_a_row} optimizer steps in a row were skipped; train.max_skipped_steps allows {self._most}"
                f"\n    fix: lower {'--critic-lr' if self._whose else '--lr'}, or resume from the last checkpoint before "
                "the loss went wrong"
            )
