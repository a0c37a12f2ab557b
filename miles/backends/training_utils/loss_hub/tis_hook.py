"""A user's correction of policy-gradient terms, by `--custom-tis-function-path`."""

# N predicted tokens, R response tokens of samples end to end, B samples

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.training_utils.checks import refuse_non_finite
from miles.backends.training_utils.loss_hub.records import LossInputs, SampleLayout
from miles.errors import HookError, MilesError

FLAG = "--custom-tis-function-path"
WANTED = "return (pg_loss of the same shape, a mask per sample or None, a dict of metrics)"


@dataclass(frozen=True, slots=True)
class OneRank:
    """What the function gets as `parallel_state`: sequences are whole."""

    cp_rank: int = 0
    cp_size: int = 1


class TisHook:
    """Calls `fn(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, ...)`.

    `pg_loss` [R] holds the terms of the micro-batch's samples end to end, the lists one tensor per sample; places that are
    not trained on hold 0 everywhere. It returns `(pg_loss, masks, metrics)`: corrected terms, the loss masks with rejected
    tokens 0 (or None), and per-token tensors [R] or numbers, reported as means over trainable tokens.

    Masks are asked for once, for the whole batch with terms of 1, since rejected tokens leave the denominators.
    """

    def __init__(self, fn: Callable[..., Any], args: Any) -> None:
        self._fn, self._args = fn, args

    def __call__(self, loss_N: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Corrected terms [N] and metrics, each [N]."""
        layout = inputs.layout
        if layout is None or inputs.old_logprobs_N is None or inputs.rollout_logprobs_N is None:
            raise ValueError(f"{FLAG} needs old and rollout log-probs, and the layout of the samples")
        if not layout.response_lengths:
            return loss_N, {}
        trainable_N = inputs.weights_N != 0
        old_N, rollout_N = (
            torch.where(trainable_N, x_N, 0) for x_N in (inputs.old_logprobs_N, inputs.rollout_logprobs_N)
        )
        terms_R, _, metrics = self._ask(
            layout.spread(loss_N),
            layout.spread(old_N),
            layout.spread(rollout_N),
            layout.spread(trainable_N.to(loss_N.dtype)),
            layout,
        )
        size = layout.num_places
        found: dict[str, Tensor] = {}
        for name, value in metrics.items():
            value = torch.as_tensor(value, dtype=loss_N.dtype).detach()
            if value.numel() not in (1, size):
                raise HookError(FLAG, f"metric {name} has {value.numel()} values for {size} response tokens", WANTED)
            found[name] = value.reshape(-1).expand(size)[layout.places_N]
        return terms_R[layout.places_N], found

    @torch.no_grad()
    def keep(
        self,
        old_R: Tensor,
        rollout_R: Tensor,
        trainable_R: Tensor,
        layout: SampleLayout,
        sample_index_B: NDArray[np.int64],
    ) -> Tensor:
        """Which trainable tokens of a whole batch are not rejected, as bool [R]; `sample_index_B` names samples in errors."""
        if not layout.response_lengths:
            return trainable_R
        old_R, rollout_R = (torch.where(trainable_R, x_R, 0) for x_R in (old_R, rollout_R))
        mask_R = trainable_R.to(old_R.dtype)
        _, masks, _ = self._ask(mask_R.clone(), old_R, rollout_R, mask_R, layout)
        if masks is None:
            return trainable_R
        lengths = [int(torch.as_tensor(m).numel()) for m in masks]
        if lengths != layout.response_lengths:
            raise HookError(
                FLAG, f"returned masks of lengths {lengths[:5]}, not {layout.response_lengths[:5]}", WANTED
            )
        kept_R = torch.cat([torch.as_tensor(m).reshape(-1) for m in masks])
        refuse_non_finite(f"a mask of {FLAG}", kept_R.numpy(), np.repeat(sample_index_B, lengths))
        return trainable_R & (kept_R != 0)

    def _ask(
        self, terms_R: Tensor, old_R: Tensor, rollout_R: Tensor, mask_R: Tensor, layout: SampleLayout
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        lengths = layout.response_lengths
        try:
            returned = self._fn(
                args=self._args,
                pg_loss=terms_R,
                train_log_probs=list(old_R.split(lengths)),
                rollout_log_probs=list(rollout_R.split(lengths)),
                loss_masks=list(mask_R.split(lengths)),
                total_lengths=layout.total_lengths,
                response_lengths=lengths,
                parallel_state=OneRank(),
                max_seq_lens=None,
            )
        except MilesError:
            raise
        except Exception as error:
            raise HookError(FLAG, f"failed with {type(error).__name__}: {error}", WANTED) from error
        if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], dict)):
            raise HookError(FLAG, f"returned {type(returned).__name__}", WANTED)
        found_R, masks, metrics = returned
        if not isinstance(found_R, Tensor) or found_R.shape != terms_R.shape:
            shape = tuple(found_R.shape) if isinstance(found_R, Tensor) else type(found_R).__name__
            raise HookError(FLAG, f"returned a pg_loss of {shape} for {tuple(terms_R.shape)}", WANTED)
        return found_R, masks, metrics
