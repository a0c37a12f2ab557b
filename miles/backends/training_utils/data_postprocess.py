"""A user's last word on a batch: `--rollout-data-postprocess-path`, between its log-probs and its advantages."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.advantages.custom import rollout_data
from miles.backends.training_utils.advantages.records import AdvantageInputs
from miles.errors import HookError, MilesError

SIGNATURE = (
    "def fn(args, rollout_data) -> None, which may change rollout_data['rewards'] and clear rollout_data['loss_masks']"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPostprocess:
    """`fn(args, rollout_data)`, called by every trainer rank with the whole batch, and the same on all.

    `rollout_data` is what an advantage function gets: see `CustomAdvantages`. The function may set other `rewards`, and
    entries of `loss_masks` to 0, which takes those tokens out of the training.
    """

    fn: Callable[[Any, dict[str, Any]], object]
    args: Any
    path: str
    """The import path, for messages."""

    def __call__(self, inputs: AdvantageInputs, columns: Mapping[str, Tensor]) -> AdvantageInputs:
        """The batch as the function left it. Raises HookError naming a sample when it fails or leaves something else."""
        data = rollout_data(inputs, columns)
        lengths: list[int] = data["response_lengths"]
        try:
            self.fn(self.args, data)
        except MilesError:
            raise
        except Exception as error:
            raise HookError(self.path, f"failed with {type(error).__name__}: {error}", SIGNATURE) from error
        return replace(inputs, rewards_B=self._rewards(data, inputs), mask_R=self._mask(data, lengths, inputs))

    def _rewards(self, data: dict[str, Any], inputs: AdvantageInputs) -> Tensor:
        try:
            rewards_B = torch.tensor([float(reward) for reward in data["rewards"]], dtype=inputs.rewards_B.dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise HookError(self.path, f"left rewards that are not numbers: {error}", SIGNATURE) from None
        if len(rewards_B) != len(inputs.rewards_B):
            found = f"left {len(rewards_B)} rewards for {len(inputs.rewards_B)} samples"
            raise HookError(self.path, found, SIGNATURE)
        for b in torch.nonzero(~rewards_B.isfinite()).flatten().tolist():
            raise HookError(
                self.path,
                f"set reward {rewards_B[b]} for sample {int(inputs.sample_index_B[b])}",
                "set a finite number",
            )
        return rewards_B

    def _mask(self, data: dict[str, Any], lengths: list[int], inputs: AdvantageInputs) -> Tensor:
        masks = data.get("loss_masks")
        if not isinstance(masks, list) or [len(row) for row in masks] != lengths:
            raise HookError(self.path, "left loss_masks of other lengths than the responses'", SIGNATURE)
        kept_R = torch.cat([torch.zeros(0), *(torch.as_tensor(row, dtype=torch.float32) for row in masks)]) != 0
        for place in torch.nonzero(kept_R & (inputs.mask_R == 0)).flatten().tolist():
            sample = int(inputs.sample_index_B[inputs.sample_of_R[place]])
            raise HookError(
                self.path, f"set the mask of a token of sample {sample} that was masked", "only clear entries"
            )
        return torch.where(kept_R, inputs.mask_R, torch.zeros_like(inputs.mask_R))
