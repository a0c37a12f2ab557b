"""One rank of the FSDP2 trainer: log-probs, parity gate, optimizer steps, checkpoints, weights for the engines."""

# B samples, R response tokens of all samples end to end, N predicted tokens of a micro-batch

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from miles.backends.fsdp_utils.checkpoint import MODEL, RankState, SavedTrainer, load_trainer
from miles.backends.fsdp_utils.critic import Critic, require_same_critic
from miles.backends.fsdp_utils.device import Ranks, pick_device
from miles.backends.fsdp_utils.hf_folder import require_same_names, write_model_folder
from miles.backends.fsdp_utils.layers import prepare_layers
from miles.backends.fsdp_utils.model import PolicyModel, hf_tensors, load_policy, release_gathered, shard
from miles.backends.fsdp_utils.offload import Part, Waiting, moments_of, weights_of
from miles.backends.fsdp_utils.optimizer import ShardedAdamW
from miles.backends.fsdp_utils.parity_gate import LateGate, check_parity
from miles.backends.fsdp_utils.steps import Outcome, SkipLimit, optimizer_step
from miles.backends.training_utils.checks import check_batch, refuse_non_finite
from miles.backends.training_utils.ci_checks import CiChecks
from miles.backends.training_utils.loss import build_denominator, build_loss
from miles.backends.training_utils.loss_hub.corrections import Correction, correct
from miles.backends.training_utils.loss_hub.records import LossInputs, LossOutput, OtherTokens
from miles.backends.training_utils.loss_hub.value_loss import explained_variance
from miles.backends.training_utils.lr_schedule import learning_rate
from miles.backends.training_utils.metrics import mean_over_steps
from miles.backends.training_utils.packing import FlatBatch, MicroBatch
from miles.backends.training_utils.parity import ParityBounds
from miles.backends.training_utils.policy_columns import (
    PolicyColumns,
    PolicyPreparation,
    layout_of,
    numbers,
    tokens_elsewhere,
)
from miles.backends.training_utils.schedule import StepPlan, plan_steps, split_into_micro_batches
from miles.config.batch_math import batch_plan
from miles.config.compute import compiles_layers, keeps_gathered, recompute_of
from miles.config.resources import engine_dtype, parity_bounds, trains_critic
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.core.train_batch import TrainBatch
from miles.errors import CheckpointError, HookError, TrainingError
from miles.utils.checkpoint_folder import cannot_write

logger = logging.getLogger(__name__)

KEPT_LOGITS = 1 / 16
"""Share of a GPU's memory for logits that are kept from the forward to the backward pass."""


class FsdpTrainWorker:
    """A trainer rank. `train`, `score`, `hf_weights` and `close` are collective: all ranks call them, with equal arguments.

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

        `total_optimizer_steps` is the length of the run for the learning-rate decay, `threads` what torch may use, `facts`
        what users' functions read of the run beside its settings.
        Raises CheckpointError when a model folder is missing or does not fit.
        """
        disable_progress_bar()
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(config.run.deterministic)
        torch.manual_seed(config.train.seed + rank)
        self._threads = threads
        self._config, self._rank, self._world_size = config, rank, world_size
        self._total_steps = total_optimizer_steps
        self._is_sft = config.algorithm.loss_type == "sft_loss"
        self._temperature = 1.0 if self._is_sft else config.rollout.temperature
        self._is_custom = config.algorithm.loss_type == "custom_loss"
        args = HookArgs(config, facts or RunFacts(run_dir=config.run.dir or ""))
        self._preparation = PolicyPreparation(config.algorithm, config.correction, args)
        self._loss = build_loss(config.algorithm, args=args, correct_terms=self._preparation.hook)
        self._scores_entropy = config.algorithm.use_rollout_entropy
        self._skips_forward = config.algorithm.skip_actor_forward_only
        self._needs_layout = (
            self._preparation.hook is not None or config.algorithm.custom_pg_loss_reducer_function_path is not None
        )
        self._denominator = build_denominator(config.algorithm, max_response_len=config.rollout.max_response_len)
        self._bounds = ParityBounds(*parity_bounds(config))
        self._ci = CiChecks(config.ci, self._bounds, bf16=config.train.bf16)
        self._num_steps = 0
        self._skips = SkipLimit(config.train.max_skipped_steps)
        self._copy: RankState | None = None

        self._folder = Path(config.model.hf_checkpoint)
        self._device = pick_device(config, rank)
        self._model, self._expected = load_policy(self._folder, self._device)
        self._engine_dtype: torch.dtype = getattr(torch, engine_dtype(config))
        self.vocab_size = self._model.vocab_size
        self._ranks = Ranks(
            self._device,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=config.cluster.wait_timeout_s),
        )
        self._group = dist.group.WORLD
        prepare_layers(self._model.hf, compiled=compiles_layers(config), recompute=recompute_of(config))
        shard(self._model, self._ranks.mesh, bf16=config.train.bf16, keeps_gathered=keeps_gathered(config))
        if self._device.type == "cuda" and recompute_of(config) != "full":
            memory = torch.cuda.get_device_properties(self._device).total_memory
            self._model.kept_logit_bytes = int(memory * KEPT_LOGITS)
        self._optimizer = ShardedAdamW(
            {n: p for n, p in hf_tensors(self._model).items() if p.requires_grad}, config.optimizer
        )
        self._reference: PolicyModel | None = None
        if (config.algorithm.use_kl_loss or config.algorithm.kl_coef) and not self._is_sft:
            self._reference, _ = load_policy(config.model.ref_load or config.model.hf_checkpoint, self._device)
            if self._reference.vocab_size != self.vocab_size:
                raise CheckpointError(
                    f"the reference model has {self._reference.vocab_size} token ids, the policy {self.vocab_size}"
                    "\n    fix: pass --ref-load a model with the same tokenizer"
                )
            self._reference.requires_grad_(False)
            prepare_layers(self._reference.hf, compiled=compiles_layers(config), recompute="none")
            shard(self._reference, self._ranks.mesh, bf16=config.train.bf16)
        self._critic: Critic | None = None
        if trains_critic(config):
            self._critic = Critic(
                config,
                self._ranks.mesh,
                self._device,
                total_optimizer_steps=total_optimizer_steps,
                vocab_size=self.vocab_size,
            )
        self._waiting: dict[Part, Waiting] = {"weights": Waiting(), "optimizer": Waiting()}

    # Training

    def train(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Run every optimizer step of the batch of rollout `step`; returns metrics, the same on all ranks.

        Raises TrainingError when the batch must not be trained on or too many steps in a row had to be skipped, and
        ParityError when the engine's log-probs are not the trainer's.
        """
        started = time.perf_counter()
        self._require("weights", "optimizer")
        packed = FlatBatch.from_batch(batch)
        check_batch(batch, packed, vocab_size=self.vocab_size, columns=self._needed_columns(batch))
        trajectory_B = numbers(batch, "trajectory").numpy()
        plans = plan_steps(
            trajectory_B,
            packed.total_lengths_B,
            packed.trainable_B,
            global_batch_size=self._config.train.global_batch_size,
            num_steps=self._config.train.num_steps_per_rollout,
            world_size=self._world_size,
            max_tokens=self._config.train.max_tokens_per_gpu,
            allow_partial=self._config.train.allow_partial_train_step,
            dynamic=self._config.train.use_dynamic_global_batch_size,
            balance_cost_B=self._balance_cost(packed.total_lengths_B),
        )
        if self._skips_forward and len(plans) > batch_plan(self._config).num_steps_per_rollout:
            raise TrainingError(
                f"step {step}: the batch makes {len(plans)} optimizer steps, and --skip-actor-forward-only takes the weights "
                "that are trained for those that sampled, which is true of the first alone"
                "\n    fix: --use-dynamic-global-batch-size in place of --global-batch-size, or leave out "
                "--skip-actor-forward-only"
            )
        steps = [
            [packed.micro_batch(part).to(self._device) for part in plan.micro_batches[self._rank]] for plan in plans
        ]
        metrics: dict[str, float] = {}
        found = PolicyColumns(values={}, mask_R=packed.mask_R, metrics={})
        values_R = None
        if not self._is_sft:
            parts = [part for parts in steps for part in parts]
            values_R = self._old_values(parts, packed, metrics)
            found = self._policy_columns(batch, packed, parts, step, metrics, values_R)
        mask_R = found.mask_R
        counted_R = packed.mask_R if self._config.correction.keep_denominator else mask_R
        weights = self._denominator.token_weights(
            counted_R,
            packed.sample_of_R,
            trajectory_B,
            [plan.samples for plan in plans],
            group_B=numbers(batch, "group_index").numpy(),
        )
        weights_R = torch.from_numpy(np.where(mask_R != 0, weights, 0)).float()

        total_steps = self._total_steps
        if self._critic is not None and values_R is not None:
            # Steps that trained the critic alone are not part of the policy's schedule.
            total_steps -= self._critic.num_steps - self._num_steps
            returns_R = self._returns(found)
            metrics |= self._critic.train(steps, weights_R, values_R, returns_R, step)
            explained = explained_variance(values_R, returns_R, weights_R != 0)
            if explained is not None:
                metrics["train/explained_variance"] = explained
        if self._critic is None or step >= self._config.critic.num_only_steps:
            metrics |= self._train_policy(batch, packed, steps, plans, weights_R, found.values, step, total_steps)
        metrics["train/optimizer_steps"] = float(self._num_steps)
        metrics["perf/train_tokens_per_s"] = float(packed.total_lengths_B.sum()) / (time.perf_counter() - started)
        return metrics

    def _train_policy(
        self,
        batch: TrainBatch,
        packed: FlatBatch,
        steps: list[list[MicroBatch]],
        plans: Sequence[StepPlan],
        weights_R: Tensor,
        columns: dict[str, Tensor],
        step: int,
        total_steps: int,
    ) -> dict[str, float]:
        """Every optimizer step of the policy, which makes `total_steps` over the whole run; returns its metrics."""
        started = time.perf_counter()
        done: list[dict[str, float]] = []
        skipped = empty = 0
        lr = 0.0
        for number, (parts, plan) in enumerate(zip(steps, plans, strict=True)):
            lr = learning_rate(self._config.optimizer, self._num_steps, total_steps)
            entries = packed.trainable[np.isin(packed.sample_of_R[packed.trainable], plan.samples)]
            inputs = self._step_inputs(batch, packed, parts, entries, weights_R, columns)
            seen: dict[str, float] = {}
            found, outcome = self._optimizer_step(
                parts, inputs, lr, self._late_gate(batch, packed, entries, step, seen) if self._skips_forward else None
            )
            found |= seen
            if number == 0 and outcome != "empty":
                self._ci.first_step(
                    found,
                    step=step,
                    trainer_is_old=not self._config.algorithm.use_rollout_logprobs,
                    reference_is_start=self._num_steps == 0 and self._config.model.ref_load is None,
                )
            if outcome != "empty":
                self._ci.grad_norm(self._num_steps, found["grad_norm"], writes=self._rank == 0)
            self._num_steps += 1
            if outcome == "skipped":
                skipped += 1
                logger.warning("step %d: optimizer step skipped, gradient norm %s", step, found["grad_norm"])
            self._skips.count(outcome, step, found.get("grad_norm", 0.0))
            if outcome == "skipped":
                continue
            if outcome == "empty":
                empty += 1
                logger.warning("step %d: an optimizer step has no trainable token and was left out", step)
            done.append(found)
        metrics = {f"train/{name}": value for name, value in mean_over_steps(done).items()}
        return metrics | {
            "train/lr": lr,
            "train/skipped_steps": float(skipped),
            "train/empty_steps": float(empty),
            "perf/actor_train_time": time.perf_counter() - started,
        }

    def _old_values(self, parts: list[MicroBatch], packed: FlatBatch, metrics: dict[str, float]) -> Tensor | None:
        """The critic's values of all trainable tokens [R] before it is trained, the same on all ranks; none is NaN or inf."""
        if self._critic is None:
            return None
        started = time.perf_counter()
        values_R = self._gathered(self._critic.values(parts, len(packed.mask_R)), packed, "the critic's value")
        metrics["perf/values_time"] = time.perf_counter() - started
        return values_R

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

    def _balance_cost(self, lengths_B: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """What ranks are to have equally much of; None deals micro-batches in turn."""
        if self._config.train.balance_by_flops:
            # Policy and critic make the same passes: one over old weights, and one with gradient for every step.
            flops = self._model.flops
            return (flops if self._critic is None else flops + self._critic.flops)(lengths_B)
        return lengths_B.astype(np.float64) if self._config.train.balance_data else None

    def _needed_columns(self, batch: TrainBatch) -> tuple[str, ...]:
        """Columns that must be there, and be finite where they are read."""
        if self._is_sft:
            return ()
        compares = self._config.parity.enabled or self._preparation.needs_rollout_log_probs
        compares = compares or "rollout_log_probs" in batch
        return ("reward", "rollout_log_probs") if compares else ("reward",)

    def _policy_columns(
        self,
        batch: TrainBatch,
        packed: FlatBatch,
        parts: list[MicroBatch],
        step: int,
        metrics: dict[str, float],
        values_R: Tensor | None,
    ) -> PolicyColumns:
        """What the losses read on the response axis [R], and the mask without rejected tokens; runs the parity gate."""
        trainer_R = ref_R = None
        gates_here = self._config.parity.enabled and not self._skips_forward
        if gates_here or self._preparation.needs_trainer_log_probs:
            trainer_R = self._score_batch(self._model, parts, packed, "the trainer's log-prob", metrics, "log_probs")
            if self._config.parity.enabled:
                differences = self._parity_gate(batch, packed, trainer_R, step)
                metrics |= {f"train/{name}": value for name, value in differences.items()}
        if self._reference is not None:
            name = "the reference model's log-prob"
            ref_R = self._score_batch(self._reference, parts, packed, name, metrics, "ref_log_probs")
        found = self._preparation(batch, packed, trainer_R, ref_R, values_R)
        self._ci.log_probs(found.metrics, step=step)
        metrics |= {f"train/{name}": value for name, value in found.metrics.items()}
        return found

    def _score_batch(
        self,
        model: PolicyModel,
        parts: list[MicroBatch],
        packed: FlatBatch,
        name: str,
        metrics: dict[str, float],
        timer: str,
    ) -> Tensor:
        """Log-probs of all trainable tokens on the response axis [R], 0 elsewhere, the same on all ranks; none is NaN or inf.

        Where the run asks for it, the policy's entropy at these tokens joins the metrics.
        """
        started = time.perf_counter()
        entropy_R = torch.zeros(len(packed.mask_R)) if self._scores_entropy and model is self._model else None
        logprobs_R = self._gathered(self._forward_only(model, parts, len(packed.mask_R), entropy_R), packed, name)
        if entropy_R is not None:
            entropy_R = self._gathered(entropy_R, packed, "the policy's entropy")
            metrics["train/rollout_entropy"] = float(entropy_R[torch.from_numpy(packed.trainable)].mean())
        metrics[f"perf/{timer}_time"] = time.perf_counter() - started
        return logprobs_R

    def _gathered(self, scores_R: Tensor, packed: FlatBatch, name: str) -> Tensor:
        """Scores of all ranks together, in place. Raises TrainingError, naming samples, when one is NaN or infinite."""
        if self._world_size > 1:
            dist.all_reduce(scores_R)
        samples = packed.sample_index_B[packed.sample_of_R[packed.trainable]]
        refuse_non_finite(name, scores_R.numpy()[packed.trainable], samples)
        return scores_R

    @torch.no_grad()
    def _forward_only(
        self, model: PolicyModel, parts: list[MicroBatch], num_entries: int, entropy_R: Tensor | None = None
    ) -> Tensor:
        """Log-probs of this rank's predicted tokens on the response axis [R], 0 elsewhere; fills `entropy_R` likewise."""
        # Nothing waits for a result before every part is on its way.
        found = [model(part, self._temperature, entropy=entropy_R is not None) for part in parts]
        release_gathered(model)
        logprobs_R = torch.zeros(num_entries)
        for part, (logprobs_N, *entropy) in zip(parts, found, strict=True):
            logprobs_R[part.entries_N] = logprobs_N.cpu()
            if entropy_R is not None:
                entropy_R[part.entries_N] = entropy[0].cpu()
        return logprobs_R

    def _step_inputs(
        self,
        batch: TrainBatch,
        packed: FlatBatch,
        parts: list[MicroBatch],
        step_entries: NDArray[np.int64],
        weights_R: Tensor,
        columns: dict[str, Tensor],
    ) -> list[dict[str, Any]]:
        """What the loss of each micro-batch of an optimizer step reads beside the current log-probs."""
        sample_R = torch.from_numpy(packed.sample_of_R)
        trajectory_R = numbers(batch, "trajectory")[sample_R]
        counted = step_entries[weights_R.numpy()[step_entries] != 0]
        num_units = len(counted)
        if not self._config.algorithm.calculate_per_token_loss:
            num_units = len(np.unique(trajectory_R.numpy()[counted]))
        found: list[dict[str, Any]] = []
        for part in parts:
            entries_N = part.entries_N
            values: dict[str, Any] = {name: values_R[entries_N] for name, values_R in columns.items()}
            values |= {
                "weights_N": weights_R[entries_N],
                "trajectory_N": trajectory_R[entries_N],
                "sample_N": sample_R[entries_N],
                "targets_N": part.targets_N,
                "num_units": float(num_units),
            }
            if self._needs_layout:
                values["layout"] = layout_of(entries_N, packed, batch.response_lengths)
            found.append(values)
        if not self._loss.needs_trajectories:
            return found
        elsewhere = tokens_elsewhere([p.entries_N.numpy() for p in parts], step_entries, trajectory_R.numpy())
        split = torch.tensor(max(len(entries) for entries in elsewhere))
        if self._world_size > 1:
            dist.all_reduce(split, op=dist.ReduceOp.MAX)
        if not split:
            return found
        # A trajectory's terms need its mean under the current weights, which no single micro-batch can give.
        now_R = self._forward_only(self._model, parts, len(packed.mask_R))
        if self._world_size > 1:
            dist.all_reduce(now_R)
        for values, entries in zip(found, elsewhere, strict=True):
            entries_M = torch.from_numpy(entries)
            values["other"] = OtherTokens(
                logprobs_M=now_R[entries_M],
                weights_M=weights_R[entries_M],
                old_logprobs_M=columns["old_logprobs_N"][entries_M],
                advantages_M=columns["advantages_N"][entries_M],
                trajectory_M=trajectory_R[entries_M],
            )
        return found

    def _optimizer_step(
        self,
        parts: list[MicroBatch],
        inputs: list[dict[str, Any]],
        lr: float,
        gate: LateGate | None,
    ) -> tuple[dict[str, float], Outcome]:
        """Metrics, and `done`, `empty` (nothing to train on) or `skipped` (gradient norm not finite).

        `gate` sees the log-probs of every micro-batch before the weights move.
        """

        def outputs() -> Iterator[LossOutput]:
            for part, values in zip(parts, inputs, strict=True):
                predicted = self._predict(part)
                if gate is not None:
                    gate.see(part.entries_N, predicted["logprobs_N"])
                if self._is_custom:
                    values = {name: _on(value, self._device) for name, value in values.items()}
                yield self._loss(LossInputs(**predicted, **values))

        return optimizer_step(self._optimizer, outputs(), lr, self._group, None if gate is None else gate.close)

    def _predict(self, part: MicroBatch) -> dict[str, Tensor]:
        """Log-probs of the predicted tokens with gradient; and entropies, and whole logits, where they are asked for.

        They come to the CPU, where the loss and all that it reads are; only a custom loss, which gets whole logits, is
        computed where those are.
        """
        algorithm = self._config.algorithm
        with_entropy = bool(algorithm.entropy_coef) or algorithm.observe_training_entropy
        logprobs_N, *others = self._model(part, self._temperature, entropy=with_entropy, logits=self._is_custom)
        if not self._is_custom and self._device.type != "cpu":
            logprobs_N, *others = torch.stack((logprobs_N, *others)).cpu().unbind()
        found = {"logprobs_N": logprobs_N}
        if with_entropy:
            entropy_N = others.pop(0)
            found["entropy_N"] = entropy_N if algorithm.entropy_coef else entropy_N.detach()
        if self._is_custom:
            found["logits_NV"] = others.pop(0)
        return found

    # Parity

    def _late_gate(
        self,
        batch: TrainBatch,
        packed: FlatBatch,
        step_entries: NDArray[np.int64],
        step: int,
        metrics: dict[str, float],
    ) -> LateGate:
        """Parity, and how far the engine is, from the log-probs of the optimizer step itself; fills `metrics`."""

        def check(logprobs_R: Tensor) -> None:
            now_R = self._gathered(logprobs_R, packed, "the trainer's log-prob")
            if self._config.parity.enabled:
                metrics.update(self._parity_gate(batch, packed, now_R, step))
            if "rollout_log_probs" in batch:
                rollout_R = torch.from_numpy(np.array(batch["rollout_log_probs"].values, dtype=np.float32))
                counted_R = torch.zeros(len(now_R), dtype=torch.bool)
                counted_R[torch.from_numpy(step_entries)] = True
                trajectory_R = numbers(batch, "trajectory")[torch.from_numpy(packed.sample_of_R)]
                found = correct(now_R, rollout_R, counted_R, trajectory_R, Correction()).metrics
                self._ci.log_probs(found, step=step)
                metrics.update(found)

        return LateGate(len(packed.mask_R), check)

    def _parity_gate(self, batch: TrainBatch, packed: FlatBatch, old_R: Tensor, step: int) -> dict[str, float]:
        """How far the engine's log-probs are from the trainer's `old_R` [R], as metrics. Raises ParityError above the bounds."""
        rollout = self._config.rollout
        return check_parity(batch, packed, old_R, score=self.score, bounds=self._bounds, rollout=rollout, step=step)

    @torch.no_grad()
    def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-probabilities of tokens 1..T-1 of each sequence under softmax(logits / temperature)."""
        self._require("weights")
        packed = FlatBatch.from_sequences(sequences)
        logprobs_R = torch.zeros(len(packed.mask_R))
        for samples in split_into_micro_batches(
            np.flatnonzero(packed.trainable_B), packed.total_lengths_B, self._config.train.max_tokens_per_gpu
        ):
            part = packed.micro_batch(samples).to(self._device)
            (logprobs_N,) = self._model(part, temperature)
            logprobs_R[part.entries_N] = logprobs_N.cpu()
        release_gathered(self._model)
        starts = packed.response_start_B.tolist()
        return [logprobs_R[s : s + max(0, len(q) - 1)].tolist() for s, q in zip(starts, sequences, strict=True)]

    # Weights

    def expected_weights(self) -> dict[str, int]:
        """Names and bytes that an engine must receive, by the headers of the model folder and the engine's data type."""
        itemsize = self._engine_dtype.itemsize
        return {name: math.prod(tensor.shape) * itemsize for name, tensor in self._expected.items()}

    @torch.no_grad()
    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under the folder's names and in the engine's data type, one at a time; of tied tensors only the first.

        They are on the trainer's device. A tensor may share memory with the model: use or copy it before the next optimizer
        step.
        """
        self._require("weights")
        for name, tensor in hf_tensors(self._model).items():
            yield name, _whole(tensor.detach(), self._engine_dtype, self._world_size).contiguous()

    # Memory

    def offload(self, *parts: Part) -> None:
        """Move these parts to the CPU's memory, all of them when none is named, and give the GPU's back."""
        for part in parts or tuple(self._waiting):
            self._waiting[part].out(self._memory(part))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, *parts: Part) -> None:
        """Bring these parts back, all of them when none is named."""
        for part in parts or tuple(self._waiting):
            self._waiting[part].back()

    def _memory(self, part: Part) -> Iterator[Tensor]:
        if part == "optimizer":
            yield from moments_of(self._optimizer)
        else:
            yield from weights_of(self._model)
            if self._reference is not None:
                yield from weights_of(self._reference)
        if self._critic is not None:
            yield from self._critic.memory(part)

    def _require(self, *parts: Part) -> None:
        for part in parts:
            if self._waiting[part].is_out:
                raise TrainingError(f"the trainer's {part} are in the CPU's memory\n    fix: call onload() before")

    # Checkpoints

    def save(self, folder: str) -> None:
        """Write model, optimizer, counters and random state into `folder`: this rank's part, on disk when this returns.

        The save is whole when it has returned on every rank. Raises CheckpointError when the disk refuses.
        """
        self._require("weights", "optimizer")
        self._rank_state().write(Path(folder))

    def copy_state(self) -> None:
        """Copy what `save` would write now, for `write_copy`; training may go on."""
        self._require("weights", "optimizer")
        self._copy = self._rank_state().copied()

    def write_copy(self, folder: str) -> float:
        """Write what `copy_state` copied, and forget it; may run beside training, in another thread.

        Returns the seconds it took. Raises CheckpointError when the disk refuses.
        """
        started = time.perf_counter()
        state, self._copy = self._copy, None
        assert state is not None
        state.write(Path(folder))
        return time.perf_counter() - started

    def load(self, folder: str) -> None:
        """Go on from a folder that `save` wrote, with the same or another number of ranks.

        Raises CheckpointError when it is incomplete, of another version, or of another model; and, of a deterministic
        run, when ranks or threads are not as many as before, since sums would be rounded in another order.
        """
        self._require("weights", "optimizer")
        with SavedTrainer(Path(folder)) as saved:
            require_same_critic(Path(folder), saved.shapes, has_critic=self._critic is not None)
        with torch.no_grad():
            tensors = self._checkpoint_tensors()
            state = load_trainer(Path(folder), tensors, rank=self._rank, world_size=self._world_size)
        try:
            saved_with = {"--train-ranks": int(state["ranks"]), "--torch-threads": int(state["threads"])}
            self._num_steps = int(state["optimizer_steps"])
            self._skips.in_a_row = int(state["skipped_in_a_row"])
            self._optimizer.set_num_updates(int(state["updates"]))
            if self._critic is not None:
                self._critic.restore(state)
        except KeyError as error:
            raise CheckpointError(
                f"{folder}: trainer.json lacks {error}\n    fix: resume from an older checkpoint"
            ) from error
        for (flag, before), now in zip(saved_with.items(), (self._world_size, self._threads), strict=True):
            if self._config.run.deterministic and before != now:
                raise CheckpointError(
                    f"{folder}: saved with {flag} {before}, and this run has {now}: it would not end in the same bits"
                    f"\n    fix: {flag} {before}, or leave out --deterministic-mode"
                )

    def _rank_state(self) -> RankState:
        state = {
            "optimizer_steps": self._num_steps,
            "updates": self._optimizer.num_updates,
            "skipped_in_a_row": self._skips.in_a_row,
            "ranks": self._world_size,
            "threads": self._threads,
            **({} if self._critic is None else self._critic.state()),
        }
        return RankState.of(self._checkpoint_tensors(), state, rank=self._rank, world_size=self._world_size)

    def _checkpoint_tensors(self) -> dict[str, Tensor]:
        model = {f"{MODEL}{name}": tensor.detach() for name, tensor in hf_tensors(self._model).items()}
        critic = {} if self._critic is None else self._critic.tensors()
        return model | cast(dict[str, Tensor], self._optimizer.moments()) | critic

    def export_hf(self, saved: str, folder: str) -> None:
        """Write the model that all ranks have put into `saved` in Hugging Face format, in the dtypes of the folder it came
        from and with that folder's other files; and the critic into the folder of --critic-save. Not collective: one rank
        does it, beside training if need be.

        Raises CheckpointError when `folder` is not empty, or the disk refuses.
        """
        with SavedTrainer(Path(saved)) as trainer:
            require_same_names([n.removeprefix(MODEL) for n in trainer.shapes if n.startswith(MODEL)], self._expected)
            try:
                write_model_folder(
                    self._folder, Path(folder), self._expected, lambda name: trainer.whole(f"{MODEL}{name}")
                )
            except OSError as error:
                raise cannot_write(Path(folder), error) from error
            critic_folder = self._config.critic.save
            if self._critic is not None and critic_folder is not None:
                try:
                    self._critic.export(trainer, Path(critic_folder))
                except OSError as error:
                    raise cannot_write(Path(critic_folder), error) from error

    def close(self) -> None:
        """Leave the process group, together: a rank that leaves early would break collectives of the others."""
        self._ranks.leave()


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _whole(tensor: Tensor, dtype: torch.dtype, world_size: int) -> Tensor:
    """The whole of a sharded tensor in `dtype`; rounded before it travels."""
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    local = tensor.to_local().to(dtype)
    if world_size == 1:
        return local
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


__all__ = ["FsdpTrainWorker"]
