"""The optimizer steps of the policy over one batch."""

# R response tokens of all samples end to end, N predicted tokens of a micro-batch, M tokens of other micro-batches, V vocabulary

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.fsdp_utils.model import keep_gathered_after_backward
from miles.backends.fsdp_utils.parity_gate import LateGate
from miles.backends.fsdp_utils.passes import Passes
from miles.backends.fsdp_utils.planned_batch import PlannedBatch
from miles.backends.fsdp_utils.roles import Roles
from miles.backends.fsdp_utils.scoring import Scoring
from miles.backends.fsdp_utils.steps import Outcome, SkipLimit, optimizer_step
from miles.backends.training_utils.ci_checks import CiChecks
from miles.backends.training_utils.loss import Loss
from miles.backends.training_utils.loss_hub.records import LossInputs, LossOutput, OtherTokens
from miles.backends.training_utils.lr_schedule import learning_rate
from miles.backends.training_utils.metrics import mean_over_steps
from miles.backends.training_utils.packing import MicroBatch
from miles.backends.training_utils.policy_columns import layout_of, tokens_elsewhere
from miles.config.schema import RunConfig

logger = logging.getLogger(__name__)


class PolicySteps:
    """Trains the policy, and counts its steps. `train` is collective."""

    def __init__(
        self, config: RunConfig, roles: Roles, passes: Passes, scoring: Scoring, loss: Loss, ci: CiChecks
    ) -> None:
        self._config, self._algorithm = config, config.algorithm
        self._roles, self._passes, self._scoring = roles, passes, scoring
        self._loss, self._ci = loss, ci
        self._is_custom = config.algorithm.loss_type == "custom_loss"
        self._with_entropy = bool(self._algorithm.entropy_coef) or self._algorithm.observe_training_entropy
        self._needs_layout = (
            config.correction.custom_tis_function_path is not None
            or config.algorithm.custom_pg_loss_reducer_function_path is not None
        )
        self._device = roles.device
        self.num_steps = 0
        """Optimizer steps so far; skipped ones count."""
        self.skips = SkipLimit(config.train.max_skipped_steps)

    def train(
        self, work: PlannedBatch, weights_R: Tensor, columns: dict[str, Tensor], total_steps: int
    ) -> dict[str, float]:
        """Every optimizer step of a batch, of the `total_steps` that the whole run makes; returns metrics.

        Raises TrainingError when too many in a row had to be skipped.
        """
        started = time.perf_counter()
        done: list[dict[str, float]] = []
        skipped = empty = 0
        lr = 0.0
        for number, (parts, plan) in enumerate(zip(work.steps, work.plans, strict=True)):
            lr = learning_rate(self._config.optimizer, self.num_steps, total_steps)
            entries = work.entries(plan)
            inputs_of = self._step_inputs(work, parts, entries, weights_R, columns)
            seen: dict[str, float] = {}
            found, outcome = self._optimizer_step(parts, inputs_of, lr, self._scoring.late_gate(work, entries, seen))
            found |= seen
            self._check(found, outcome, work.step, is_first=number == 0)
            self.num_steps += 1
            if outcome == "skipped":
                skipped += 1
                logger.warning("step %d: optimizer step skipped, gradient norm %s", work.step, found["grad_norm"])
            self.skips.count(outcome, work.step, found.get("grad_norm", 0.0))
            if outcome == "skipped":
                continue
            if outcome == "empty":
                empty += 1
                logger.warning("step %d: an optimizer step has no trainable token and was left out", work.step)
            done.append(found)
        metrics = {f"train/{name}": value for name, value in mean_over_steps(done).items()}
        return metrics | {
            "train/lr": lr,
            "train/skipped_steps": float(skipped),
            "train/empty_steps": float(empty),
            "perf/actor_train_time": time.perf_counter() - started,
        }

    def _check(self, found: dict[str, float], outcome: Outcome, step: int, *, is_first: bool) -> None:
        """The checks of CI on an optimizer step, the first of its batch or a later one."""
        if outcome == "empty":
            return
        if is_first:
            self._ci.first_step(
                found,
                step=step,
                trainer_is_old=not self._algorithm.use_rollout_logprobs,
                reference_is_start=self.num_steps == 0 and self._config.model.ref_load is None,
            )
        self._ci.grad_norm(self.num_steps, found["grad_norm"], writes=dist.get_rank() == 0)

    def _step_inputs(
        self,
        work: PlannedBatch,
        parts: Sequence[MicroBatch],
        step_entries: NDArray[np.int64],
        weights_R: Tensor,
        columns: dict[str, Tensor],
    ) -> Callable[[int], dict[str, Any]]:
        """What the loss of a micro-batch of an optimizer step, by its number, reads beside the current log-probs."""
        packed, trajectory_R = work.packed, work.trajectory_R
        sample_R = torch.from_numpy(packed.sample_of_R)
        num_units = self._num_units(step_entries, weights_R, trajectory_R)
        others: list[OtherTokens] = []
        if self._loss.needs_trajectories:
            others = self._other_tokens(parts, step_entries, weights_R, columns, trajectory_R)

        def of(number: int) -> dict[str, Any]:
            part = parts[number]
            entries_N = part.entries_N
            values: dict[str, Any] = {name: values_R[entries_N] for name, values_R in columns.items()}
            values |= {
                "weights_N": weights_R[entries_N],
                "trajectory_N": trajectory_R[entries_N],
                "sample_N": sample_R[entries_N],
                "targets_N": part.targets_N,
                "num_units": num_units,
            }
            if self._needs_layout:
                values["layout"] = layout_of(entries_N, packed, work.batch.response_lengths)
            if others:
                values["other"] = others[number]
            return values

        return of

    def _num_units(self, step_entries: NDArray[np.int64], weights_R: Tensor, trajectory_R: Tensor) -> float:
        """How many tokens of an optimizer step count, or trajectories where the loss is a mean over these."""
        counted = step_entries[weights_R.numpy()[step_entries] != 0]
        if self._algorithm.calculate_per_token_loss:
            return float(len(counted))
        return float(len(np.unique(trajectory_R.numpy()[counted])))

    def _other_tokens(
        self,
        parts: Sequence[MicroBatch],
        step_entries: NDArray[np.int64],
        weights_R: Tensor,
        columns: dict[str, Tensor],
        trajectory_R: Tensor,
    ) -> list[OtherTokens]:
        """For each micro-batch, the tokens of its trajectories that others have; nothing where none is torn apart."""
        elsewhere = tokens_elsewhere([p.entries_N.numpy() for p in parts], step_entries, trajectory_R.numpy())
        split = torch.tensor(max(len(entries) for entries in elsewhere))
        if dist.get_world_size() > 1:
            dist.all_reduce(split, op=dist.ReduceOp.MAX)
        if not split:
            return []
        # A trajectory's terms need its mean under the current weights, which no single micro-batch can give.
        now_R = self._passes.forward_only(self._roles.policy, parts, len(weights_R))
        if dist.get_world_size() > 1:
            dist.all_reduce(now_R)

        def tokens(entries_M: Tensor) -> OtherTokens:
            return OtherTokens(
                logprobs_M=now_R[entries_M],
                weights_M=weights_R[entries_M],
                old_logprobs_M=columns["old_logprobs_N"][entries_M],
                advantages_M=columns["advantages_N"][entries_M],
                trajectory_M=trajectory_R[entries_M],
            )

        return [tokens(torch.from_numpy(entries)) for entries in elsewhere]

    def _optimizer_step(
        self, parts: Sequence[MicroBatch], inputs_of: Callable[[int], dict[str, Any]], lr: float, gate: LateGate | None
    ) -> tuple[dict[str, float], Outcome]:
        """Metrics, and `done`, `empty` (nothing to train on) or `skipped` (gradient norm not finite).

        `gate` sees the log-probs of every micro-batch before the weights move.
        """

        def outputs() -> Iterator[LossOutput]:
            last = len(parts) - 1
            for number, part in enumerate(parts):
                keep_gathered_after_backward(self._roles.policy, keeps=number < last)
                found = self._forward(part)
                values = inputs_of(number)  # while a GPU is at it
                predicted = self._predicted(found)
                if gate is not None:
                    gate.see(part.entries_N, predicted["logprobs_N"])
                if self._is_custom:
                    values = {name: _on(value, self._device) for name, value in values.items()}
                yield self._loss(LossInputs(**predicted, **values))

        close = None if gate is None else gate.close
        return optimizer_step(self._roles.optimizer, outputs(), lr, dist.group.WORLD, close)

    def _forward(self, part: MicroBatch) -> tuple[Tensor, ...]:
        """Log-probs of the predicted tokens with gradient; and entropies, and whole logits, where they are asked for."""
        return self._roles.policy(part, self._passes.temperature, entropy=self._with_entropy, logits=self._is_custom)

    def _predicted(self, found: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The results of `_forward` by name.

        They come to the CPU, where the loss and all that it reads are; only a custom loss, which gets whole logits, is
        computed where those are.
        """
        if not self._is_custom and self._device.type != "cpu":
            found = torch.stack(found).cpu().unbind()
        logprobs_N, *others = found
        predicted = {"logprobs_N": logprobs_N}
        if self._with_entropy:
            entropy_N = others.pop(0)
            predicted["entropy_N"] = entropy_N if self._algorithm.entropy_coef else entropy_N.detach()
        if self._is_custom:
            predicted["logits_NV"] = others.pop(0)
        return predicted


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


__all__ = ["PolicySteps"]
