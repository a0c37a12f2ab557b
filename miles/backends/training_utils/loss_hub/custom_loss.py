"""A user's loss, by `--custom-loss-function-path`, given whole logits."""

# N predicted tokens, V vocabulary

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.records import LossInputs, LossMetrics, LossOutput
from miles.errors import HookError, MilesError

FLAG = "--custom-loss-function-path"
WANTED = "def fn(args, batch, logits, reducer) -> (loss, metrics): a scalar with gradient, and numbers by name"
NAMES = {
    "targets_N": "targets",
    "trajectory_N": "trajectory",
    "weights_N": "weights",
    "old_logprobs_N": "log_probs",
    "rollout_logprobs_N": "rollout_log_probs",
    "ref_logprobs_N": "ref_log_probs",
    "advantages_N": "advantages",
}
"""Column of the loss's inputs -> its name in `batch`."""


class CustomLoss:
    """Calls `fn(args, batch, logits, reducer)` for each micro-batch that has a trainable token.

    `logits` [N, V] are fp32, over the rollout temperature, with gradient: row n predicts `batch["targets"][n]`. `batch` has
    one value per predicted token (see NAMES; a column that the run does not have is left out), masked tokens are not in
    it. `reducer(x_N)` is the sum of x over the run's denominator: the loss of the step is the sum of what micro-batches
    return, so a loss made with `reducer` does not depend on how the batch is split. Metrics made with it add up likewise.
    """

    needs_trajectories = False

    def __init__(self, fn: Callable[..., Any], args: Any) -> None:
        self._fn, self._args = fn, args

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of a micro-batch; needs `logits_NV`. Raises HookError when the function returns something else."""
        if inputs.logits_NV is None:
            raise ValueError("a custom loss needs logits")
        kept_N = inputs.weights_N != 0
        num_tokens = int(kept_N.sum())
        if not num_tokens:
            return LossOutput(inputs.logits_NV.sum() * 0, lambda: LossMetrics(num_tokens=0))
        columns = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        batch = {name: columns[column][kept_N] for column, name in NAMES.items() if columns[column] is not None}

        def reducer(values_N: Tensor) -> Tensor:
            return (batch["weights"] * values_N).sum()

        try:
            returned = self._fn(self._args, batch, inputs.logits_NV[kept_N], reducer)
        except MilesError:
            raise
        except Exception as error:
            raise HookError(FLAG, f"failed with {type(error).__name__}: {error}", WANTED) from error
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
            raise HookError(FLAG, f"returned {type(returned).__name__}", WANTED)
        loss, metrics = returned
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shape = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise HookError(FLAG, f"returned a loss that is no scalar with gradient: {shape}", WANTED)
        found = LossMetrics(weighted=_numbers(metrics), num_tokens=num_tokens)
        return LossOutput(loss.reshape(()), lambda: found)


def _numbers(metrics: dict[Any, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in metrics.items():
        is_number = isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)
        if not isinstance(name, str) or not is_number:
            raise HookError(FLAG, f"returned the metric {name!r} as {type(value).__name__}", WANTED)
        found[name] = torch.as_tensor(value).detach().reshape(())
    return found
