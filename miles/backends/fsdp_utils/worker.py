"""One rank of the FSDP2 trainer, put together from its parts: roles, scoring, optimizer steps, memory, checkpoints, weights."""

# B samples, R response tokens of all samples end to end

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from miles.backends.fsdp_utils.critic import Critic
from miles.backends.fsdp_utils.device import Ranks, pick_device
from miles.backends.fsdp_utils.engine_weights import EngineWeights
from miles.backends.fsdp_utils.memory import RolesMemory
from miles.backends.fsdp_utils.model import load_policy
from miles.backends.fsdp_utils.offload import Part
from miles.backends.fsdp_utils.passes import Passes
from miles.backends.fsdp_utils.planned_batch import PlannedBatch, balance_cost, plan_batch
from miles.backends.fsdp_utils.policy_steps import PolicySteps
from miles.backends.fsdp_utils.roles import prepare_roles
from miles.backends.fsdp_utils.scoring import Scoring
from miles.backends.fsdp_utils.trainer_state import TrainerState
from miles.backends.fsdp_utils.warm_up import warm_up
from miles.backends.training_utils.checks import check_batch
from miles.backends.training_utils.ci_checks import CiChecks
from miles.backends.training_utils.loss import build_denominator, build_loss
from miles.backends.training_utils.loss_hub.value_loss import explained_variance
from miles.backends.training_utils.packing import FlatBatch
from miles.backends.training_utils.parity import ParityBounds
from miles.backends.training_utils.policy_columns import PolicyColumns, PolicyPreparation, numbers
from miles.config.compute import compiles_layers
from miles.config.resources import machine_cores, offload_threads, parity_bounds, parity_only_warns
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.core.train_batch import TrainBatch
from miles.errors import HookError


class FsdpTrainWorker:
    """A trainer rank. `warm_up`, `train`, `score`, `hf_weights` and `close` are collective: all ranks call them, with equal arguments.

    Every rank is handed the whole batch and takes its share, so denominators need no exchange.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        world_size: int,
        init_method: str,
        total_optimizer_steps: int,
        threads: int,
        facts: RunFacts | None = None,
    ) -> None:
        """Join the process group at `init_method` (tcp://host:port or file://path) and load the model.

        `total_optimizer_steps` is the length of the run for the learning-rate decay, `threads` what torch computes with
        once everything is loaded, `facts` what users' functions read of the run beside its settings.
        Raises CheckpointError when a model folder is missing or does not fit.
        """
        _set_up_torch(config, rank)
        self._config, self._rank, self._world_size = config, rank, world_size
        self._total_steps = total_optimizer_steps
        args = HookArgs(config, facts or RunFacts(run_dir=config.run.dir or ""))
        preparation = PolicyPreparation(config.algorithm, config.correction, args)
        loss = build_loss(config.algorithm, args=args, correct_terms=preparation.hook)
        self._denominator = build_denominator(config.algorithm, max_response_len=config.rollout.max_response_len)
        bounds = ParityBounds(*parity_bounds(config), parity_only_warns(config))
        ci = CiChecks(config.ci, bounds, bf16=config.train.bf16)
        self._device = pick_device(config, rank)
        policy, stored = load_policy(config.model.hf_checkpoint, self._device)
        self.vocab_size = policy.vocab_size
        timeout = timedelta(seconds=config.cluster.wait_timeout_s)
        self._ranks = Ranks(self._device, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
        self._roles = prepare_roles(
            config, policy, stored, self._ranks.mesh, total_optimizer_steps=total_optimizer_steps
        )
        torch.set_num_threads(threads)
        self._memory = RolesMemory(self._roles)
        self._passes = Passes(config, self._roles)
        self._scoring = Scoring(config, self._roles, self._passes, preparation, bounds, ci)
        self._steps = PolicySteps(config, self._roles, self._passes, self._scoring, loss, ci)
        sums_with = offload_threads(config) or threads
        self._state = TrainerState(
            config, self._roles, self._steps, rank=rank, world_size=world_size, threads=sums_with
        )
        self._weights = EngineWeights(config, self._roles)

    # Training

    def warm_up(self) -> None:
        """Compile what is compiled, so that the first batch does not wait for it; of no effect on results."""
        if compiles_layers(self._config):
            warm_up(self._roles)

    def train(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Run every optimizer step of the batch of rollout `step`; returns metrics, the same on all ranks.

        Raises TrainingError when the batch must not be trained on or too many steps in a row had to be skipped, and
        ParityError when the engine's log-probs are not the trainer's.
        """
        started = time.perf_counter()
        self._memory.require("weights", "optimizer")
        work = self._plan(batch, step)
        metrics: dict[str, float] = {}
        found, values_R = self._scoring(work, metrics)
        weights_R = self._token_weights(work, found)
        critic, total_steps = self._roles.critic, self._total_steps
        if critic is not None and values_R is not None:
            # Steps that trained the critic alone are not part of the policy's schedule.
            total_steps -= critic.num_steps - self._steps.num_steps
            metrics |= self._train_critic(critic, work, weights_R, values_R, self._returns(found))
        if critic is None or step >= self._config.critic.num_only_steps:
            metrics |= self._steps.train(work, weights_R, found.values, total_steps)
        metrics["train/optimizer_steps"] = float(self._steps.num_steps)
        tokens = float(work.packed.total_lengths_B.sum())
        metrics["perf/train_tokens_per_s"] = tokens / (time.perf_counter() - started)
        return metrics

    def _plan(self, batch: TrainBatch, step: int) -> PlannedBatch:
        """Check a batch, and cut it. Raises TrainingError."""
        packed = FlatBatch.from_batch(batch)
        check_batch(batch, packed, vocab_size=self.vocab_size, columns=self._scoring.needed_columns(batch))
        return plan_batch(
            self._config,
            batch,
            packed,
            balance_cost_B=balance_cost(self._config, self._roles, packed.total_lengths_B),
            rank=self._rank,
            world_size=self._world_size,
            device=self._device,
            step=step,
        )

    def _token_weights(self, work: PlannedBatch, found: PolicyColumns) -> Tensor:
        """What the terms of each response token [R] are multiplied with; 0 where nothing is trained on."""
        mask_R = found.mask_R
        weights = self._denominator.token_weights(
            work.packed.mask_R if self._config.correction.keep_denominator else mask_R,
            work.packed.sample_of_R,
            numbers(work.batch, "trajectory").numpy(),
            [plan.samples for plan in work.plans],
            group_B=numbers(work.batch, "group_index").numpy(),
        )
        return torch.from_numpy(np.where(mask_R != 0, weights, 0)).float()

    def _train_critic(
        self, critic: Critic, work: PlannedBatch, weights_R: Tensor, values_R: Tensor, returns_R: Tensor
    ) -> dict[str, float]:
        """Every optimizer step of the critic; returns its metrics."""
        metrics = critic.train(work.steps, weights_R, values_R, returns_R, work.step)
        explained = explained_variance(values_R, returns_R, weights_R != 0)
        return metrics if explained is None else metrics | {"train/explained_variance": explained}

    def _returns(self, found: PolicyColumns) -> Tensor:
        """What the critic is trained towards, [R]. Raises HookError when a user's advantage function leaves it out."""
        if found.returns_R is None:
            path = self._config.algorithm.custom_advantage_function_path or ""
            raise HookError(
                path,
                "did not set rollout_data['returns'], which the critic of --advantage-estimator ppo is trained towards",
                "set rollout_data['returns'], or take an estimator without a critic",
            )
        return found.returns_R

    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-probabilities of tokens 1..T-1 of each sequence under softmax(logits / temperature)."""
        self._memory.require("weights")
        return self._passes.sequences(sequences, temperature)

    # Weights

    def expected_weights(self) -> dict[str, int]:
        """Names and bytes that an engine must receive, by the headers of the model folder and the engine's data type."""
        return self._weights.expected()

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under the folder's names and in the engine's data type, one at a time; of tied tensors only the first.

        They are on the trainer's device. A tensor may share memory with the model: use or copy it before the next optimizer
        step.
        """
        self._memory.require("weights")
        yield from self._weights.tensors()

    # Memory

    def offload(self, *parts: Part) -> None:
        """Move these parts to the CPU's memory, all of them when none is named, and give the GPU's back."""
        self._memory.offload(*parts)

    def onload(self, *parts: Part) -> None:
        """Bring these parts back, all of them when none is named."""
        self._memory.onload(*parts)

    # Checkpoints

    def save(self, folder: str) -> None:
        """Write model, optimizer, counters and random state into `folder`: this rank's part, on disk when this returns.

        The save is whole when it has returned on every rank. Raises CheckpointError when the disk refuses.
        """
        self._memory.require("weights", "optimizer")
        self._state.save(Path(folder))

    def copy_state(self) -> None:
        """Copy what `save` would write now, for `write_copy`; training may go on."""
        self._memory.require("weights", "optimizer")
        self._state.copy()

    def write_copy(self, folder: str) -> float:
        """Write what `copy_state` copied, and forget it; may run beside training, in another thread.

        Returns the seconds it took. Raises CheckpointError when the disk refuses.
        """
        return self._state.write_copy(Path(folder))

    def load(self, folder: str) -> None:
        """Go on from a folder that `save` wrote, with the same or another number of ranks.

        Raises CheckpointError when it is incomplete, of another version, or of another model; and, of a deterministic
        run, when ranks or threads are not as many as before, since sums would be rounded in another order.
        """
        self._memory.require("weights", "optimizer")
        self._state.load(Path(folder))

    def export_hf(self, saved: str, folder: str) -> None:
        """Write the model that all ranks have put into `saved` in Hugging Face format, in the dtypes of the folder it came
        from and with that folder's other files; and the critic into the folder of --critic-save. Not collective: one rank
        does it, beside training if need be.

        Raises CheckpointError when `folder` is not empty, or the disk refuses.
        """
        self._state.export_hf(Path(saved), Path(folder))

    def close(self) -> None:
        """Leave the process group, together: a rank that leaves early would break collectives of the others."""
        self._ranks.leave()


def _set_up_torch(config: RunConfig, rank: int) -> None:
    disable_progress_bar()
    torch.set_num_threads(machine_cores())  # while it loads
    torch.use_deterministic_algorithms(config.run.deterministic)
    torch.manual_seed(config.train.seed + rank)


__all__ = ["FsdpTrainWorker"]
