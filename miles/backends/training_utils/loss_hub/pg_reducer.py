"""A user's sum of policy-gradient terms, by `--custom-pg-loss-reducer-function-path`."""

# N predicted tokens of the micro-batch, R response tokens of its samples end to end

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.records import LossInputs
from miles.errors import HookError, MilesError

FLAG = "--custom-pg-loss-reducer-function-path"
WANTED = (
    "def fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss), which returns a function "
    "from the terms of these response tokens, end to end, to their sum: a scalar with gradient"
)


class PgReducer:
    """Calls `fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)` and what it returns, for each micro-batch.

    The lists have one entry for each of the micro-batch's samples with a trainable token; masks hold 0 where a token is
    not trained on or was rejected, and so do the terms [R]. What comes out is divided by `LossInputs.num_units`, which
    belongs to the whole optimizer step: so the loss does not depend on how the step is split, as long as the function
    adds up over samples.
    """

    def __init__(self, fn: Callable[..., Any], *, per_token: bool) -> None:
        """`per_token` is handed to the function: the sum will be divided by the step's tokens, not its trajectories."""
        self._fn, self._per_token = fn, per_token

    def __call__(self, loss_N: Tensor, inputs: LossInputs) -> Tensor:
        """The micro-batch's addend to the step's loss. Raises HookError when the function fails or gives something else."""
        layout = inputs.layout
        if layout is None or inputs.num_units is None:
            raise ValueError(f"{FLAG} needs the layout of the samples, and what their sum is divided by")
        lengths = layout.response_lengths
        mask_R = layout.spread((inputs.weights_N != 0).to(loss_N.dtype))
        rows = list(
            zip(layout.total_lengths, mask_R.split(lengths), layout.spread(loss_N).split(lengths), strict=True)
        )
        rows = [row for row in rows if bool(row[1].any())]
        if not rows:
            return loss_N.sum() * 0
        totals, masks, terms = (list(column) for column in zip(*rows, strict=True))
        try:
            reduced = self._fn(totals, [len(mask) for mask in masks], masks, self._per_token)(torch.cat(terms))
        except MilesError:
            raise
        except Exception as error:
            raise HookError(FLAG, f"failed with {type(error).__name__}: {error}", WANTED) from error
        if not isinstance(reduced, Tensor) or reduced.numel() != 1 or (loss_N.requires_grad > reduced.requires_grad):
            found = tuple(reduced.shape) if isinstance(reduced, Tensor) else type(reduced).__name__
            raise HookError(FLAG, f"returned something else: {found}", WANTED)
        return reduced.reshape(()) / inputs.num_units
