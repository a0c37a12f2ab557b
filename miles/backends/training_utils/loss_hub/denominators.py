"""What a step's loss is divided by: one explicit choice, counted over all micro-batches and ranks before backward."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DenominatorKind = Literal["trajectories", "sequences", "prompts", "tokens", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominator:
    """How a step's tokens share the weight of its loss; every term of the loss uses the same weights.

    `trajectories`: the mean over a trajectory's tokens, then over trajectories (Shao et al. 2024, GRPO), however many
    samples a trajectory is split into. `sequences`: the same with samples for trajectories. `prompts`: the mean over all
    tokens of a prompt, then over prompts (Yu et al. 2025, DAPO, as printed). `tokens`: the mean over all tokens of the
    step. `constant`: a trajectory's sum over `constant`, then the mean over trajectories (Liu et al. 2025, Dr. GRPO).
    """

    kind: DenominatorKind = "trajectories"
    constant: float = 1.0
    """Tokens that a trajectory's sum is divided by; read by `constant` alone."""

    def token_weights(
        self,
        mask_R: NDArray[np.float32],
        sample_of_R: NDArray[np.int64],
        trajectory_B: NDArray[np.int64],
        steps: Sequence[NDArray[np.int64]],
        *,
        group_B: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        """Each response token's weight in the loss of its optimizer step, over the whole step: all micro-batches, all ranks.

        `steps` lists the samples of each optimizer step; a trajectory lies within one step. What has no trainable token
        is not counted. The weights of a step sum to 1 (but for `constant`), or to 0 when it has no trainable token.
        `group_B` says which prompt a sample answers; `prompts` alone needs it. Returns [R].
        """
        step_of_B = np.full(len(trajectory_B), -1, dtype=np.int64)
        for number, samples in enumerate(steps):
            step_of_B[samples] = number
        mask = mask_R.astype(np.float64) * (step_of_B[sample_of_R] >= 0)
        unit_B = self._units(trajectory_B, group_B, step_of_B)
        tokens = np.bincount(unit_B[sample_of_R], weights=mask, minlength=int(unit_B.max(initial=-1)) + 1)
        step_of_unit = np.full(len(tokens), -1, dtype=np.int64)
        step_of_unit[unit_B] = step_of_B
        counted = np.bincount(step_of_unit + 1, weights=tokens > 0, minlength=len(steps) + 1)
        size_B = np.full(len(unit_B), self.constant) if self.kind == "constant" else tokens[unit_B]
        denominator_B = size_B * counted[step_of_B + 1]
        return np.divide(mask, denominator_B[sample_of_R], out=np.zeros_like(mask), where=mask != 0)

    def _units(
        self, trajectory_B: NDArray[np.int64], group_B: NDArray[np.int64] | None, step_of_B: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Which unit, of those that weigh alike within a step, a sample belongs to; numbered from 0, none in two steps."""
        if self.kind == "tokens":
            unit_B = step_of_B
        elif self.kind == "sequences":
            unit_B = np.arange(len(trajectory_B))
        elif self.kind == "prompts":
            if group_B is None:
                raise ValueError("the denominator `prompts` needs the prompt group of each sample")
            unit_B = group_B
        else:
            unit_B = trajectory_B
        pairs = np.stack([step_of_B, unit_B])
        return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)
