"""A user's own estimator: `--custom-advantage-function-path`."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.advantages.records import AdvantageInputs, AdvantageOutput
from miles.errors import HookError, MilesError

SIGNATURE = "def fn(args, rollout_data) -> None, which sets rollout_data['advantages'], one row per sample"


def rollout_data(inputs: AdvantageInputs, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """A batch as users' functions get it: lists with one entry per sample, whose tensors are copies of its response's length."""
    lengths = torch.bincount(inputs.sample_of_R, minlength=len(inputs.rewards_B)).tolist()
    per_token = {"loss_masks": inputs.mask_R, "kl": inputs.kl_R, "values": inputs.values_R, **columns}
    return {
        "rewards": inputs.rewards_B.tolist(),
        "response_lengths": lengths,
        "sample_indices": inputs.sample_index_B.tolist(),
        "rollout_ids": inputs.trajectory_B.tolist(),
        "group_indices": inputs.group_B.tolist(),
        **{name: list(rows.clone().split(lengths)) for name, rows in per_token.items() if rows is not None},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomAdvantages:
    """`fn(args, rollout_data)` as an estimator: it is given the whole batch, on every rank, and sets its answer in it.

    `rollout_data` has one entry per sample: numbers in `rewards` (compared within the group already), `response_lengths`,
    `sample_indices`, `rollout_ids` (equal for the parts of one trajectory) and `group_indices`; tensors of the
    response's length in `loss_masks`, `kl` and `values` where there are any, and the names of `columns`. The function
    sets `advantages`, and `returns` if it has any, to one row of the response's length per sample. Every rank calls it
    and must get the same answer.
    """

    fn: Callable[[Any, dict[str, Any]], object]
    args: Any
    path: str
    """The import path, for messages."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Further per-token values by name, each [R], such as `log_probs`."""

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """What the function set, [R], 0 at masked tokens. Raises HookError when it fails or sets something else."""
        data = rollout_data(inputs, self.columns)
        lengths: list[int] = data["response_lengths"]
        try:
            self.fn(self.args, data)
        except MilesError:
            raise
        except Exception as error:
            raise HookError(self.path, f"failed with {type(error).__name__}: {error}", SIGNATURE) from error
        advantages_R = self._flat(data, "advantages", lengths, inputs)
        if advantages_R is None:
            raise HookError(self.path, "did not set rollout_data['advantages']", SIGNATURE)
        return AdvantageOutput(advantages_R=advantages_R, returns_R=self._flat(data, "returns", lengths, inputs))

    def _flat(self, data: dict[str, Any], name: str, lengths: list[int], inputs: AdvantageInputs) -> Tensor | None:
        if data.get(name) is None:
            return None
        like = {"dtype": inputs.rewards_B.dtype, "device": inputs.mask_R.device}
        try:
            rows = [torch.as_tensor(row, **like).detach() for row in data[name]]
        except (TypeError, ValueError, RuntimeError) as error:
            raise HookError(self.path, f"set rollout_data[{name!r}] to something else: {error}", SIGNATURE) from None
        found = [list(row.shape) for row in rows]
        if len(found) != len(lengths):
            raise HookError(self.path, f"set {len(found)} rows of {name} for {len(lengths)} samples", SIGNATURE)
        for b, (shape, length) in enumerate(zip(found, lengths, strict=True)):
            if shape != [length]:
                sample = int(inputs.sample_index_B[b])
                raise HookError(
                    self.path,
                    f"set {name} of shape {shape} for sample {sample}, whose response has {length} tokens",
                    SIGNATURE,
                )
        values_R = torch.cat([torch.zeros(0, **like), *rows])
        return torch.where(inputs.mask_R != 0, values_R, torch.zeros_like(values_R))
