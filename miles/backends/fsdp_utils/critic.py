"""The critic: a decoder with one value per token in place of logits, a role inside each trainer rank."""

# T tokens of a pack, N predicted tokens, D hidden size, R response tokens of all samples end to end

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModel, PreTrainedModel

from miles.backends.fsdp_utils.adaptations.fitness import require_attention_only, require_layers
from miles.backends.fsdp_utils.adaptations.registry import adaptation_of
from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from miles.backends.fsdp_utils.hf_folder import (
    HEAD,
    require_model_folder,
    stored_tensors,
    weight_files,
    write_model_folder,
)
from miles.backends.fsdp_utils.layers import prepare_layers
from miles.backends.fsdp_utils.model import (
    CPU,
    PREFIX,
    DecoderModel,
    disable_dropout,
    folder_places,
    release_gathered,
    shard,
    sharding_of,
)
from miles.backends.fsdp_utils.offload import Part, moments_of, weights_of
from miles.backends.fsdp_utils.optimizer import ShardedAdamW
from miles.backends.fsdp_utils.packed_attention import take_rows, use_packed_attention
from miles.backends.fsdp_utils.steps import SkipLimit, optimizer_step
from miles.backends.fsdp_utils.tensor_file import StoredTensor
from miles.backends.training_utils.loss_hub.records import LossOutput
from miles.backends.training_utils.loss_hub.value_loss import ValueInputs, ValueLoss
from miles.backends.training_utils.lr_schedule import learning_rate
from miles.backends.training_utils.metrics import mean_over_steps
from miles.backends.training_utils.packing import FlatBatch, MicroBatch
from miles.backends.training_utils.schedule import SequenceFlops
from miles.config.compute import compiles_layers, keeps_gathered, recompute_of
from miles.config.resources import critic_optimizer, offload_threads
from miles.config.schema import RunConfig
from miles.errors import CheckpointError, TrainingError

logger = logging.getLogger(__name__)

VALUE_HEAD = "value_head.weight"
"""The head's name in a critic's folder; its shape is [1, D]."""
CRITIC = "critic."
"""What the names of the critic's tensors and counters begin with in a checkpoint."""


class CriticModel(DecoderModel):
    """A decoder and a linear head without bias, in one forward."""

    def __init__(self, hf: PreTrainedModel, head_1D: Tensor) -> None:
        super().__init__(hf)
        self.value_head = nn.Parameter(head_1D)

    def forward(self, part: MicroBatch) -> Tensor:
        """Values before each predicted token, in units of the reward: of the tokens up to the one before it; fp32 [N]."""
        hidden_TD = self.hf(
            input_ids=part.input_ids_T.unsqueeze(0),
            position_ids=part.position_ids_T.unsqueeze(0),
            sequence_layout=part.layout,
            use_cache=False,
        ).last_hidden_state[0]
        hidden_ND = take_rows(hidden_TD, part.positions_N)
        return hidden_ND.float().mv(self.value_head[0].float())


def critic_tensors(model: CriticModel) -> dict[str, Tensor]:
    """Parameters and saved buffers by the names that a language model's module has for them, and the value head."""
    inside = f"{model.hf.base_model_prefix}."
    return {
        f"{inside}{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else VALUE_HEAD: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def load_critic(folder: str | Path, device: torch.device = CPU) -> tuple[CriticModel, dict[str, StoredTensor]]:
    """Load a critic in fp32 to `device` from a folder of a language model or of a critic, and the list of its tensors in the folder.

    A language model's output head is left out, and the value head starts at zero: every value is 0. Raises
    CheckpointError when the folder is missing, does not hold the tensors of the model that its config.json describes, or
    holds a model whose layers mix tokens of different sequences in a pack.
    """
    path = require_model_folder(folder)
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        hf = cast(
            PreTrainedModel,
            AutoModel.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="sdpa",
                **adaptation_of(config.model_type).load_options,
            ),
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: config.json does not load: {error}\n    fix: check the folder") from error
    require_attention_only(path, config)
    require_layers(path, hf)
    stored = {name: tensor for name, tensor in stored_tensors(path, tied=False).items() if name != HEAD}
    model = CriticModel(hf, torch.zeros(1, hf.config.get_text_config().hidden_size))
    tensors = critic_tensors(model)
    places = folder_places(hf, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    wrong = sorted({*stored, VALUE_HEAD} ^ set(places))
    wrong = wrong or [name for name, tensor in stored.items() if tensor.shape != places[name].shape]
    if wrong:
        raise CheckpointError(
            f"{path}: the tensors are not those of a critic by its config.json, first: {', '.join(wrong[:5])}"
            "\n    fix: give --critic-load a language model's folder, or one that --critic-save wrote"
        )
    with torch.no_grad():
        for file in weight_files(path):
            with safe_open(file, framework="pt") as stream:
                for name in stream.keys():  # noqa: SIM118
                    if name in stored:
                        places[name].of(tensors[places[name].source]).copy_(stream.get_tensor(name))
    model.to(device)
    disable_dropout(model)
    _pack_attention(path, model, device)
    model.train()
    stored.setdefault(VALUE_HEAD, StoredTensor(tuple(model.value_head.shape), torch.float32))
    return model, stored


@torch.no_grad()
def _pack_attention(path: Path, model: CriticModel, device: torch.device) -> None:
    """Switch to packed attention, and compare the hidden states of a pack with those of each of its sequences alone."""
    tokens = torch.arange(23, device=device) * 7 % model.vocab_size
    sequences = [tokens[:14], tokens[14:20], tokens[20:]]
    alone = [model.hf(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0, :-1] for tokens_T in sequences]
    alone_TD = torch.cat(alone)  # a pack does without last tokens, after which nothing is predicted
    use_packed_attention(model.hf)
    packed = FlatBatch.from_sequences([s.tolist() for s in sequences])
    part = packed.micro_batch(np.arange(len(sequences))).to(device)
    try:
        pack_TD = model.hf(
            input_ids=part.input_ids_T[None],
            position_ids=part.position_ids_T[None],
            sequence_layout=part.layout,
            use_cache=False,
        ).last_hidden_state[0]
    except (TrainingError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    worst = float((pack_TD - alone_TD).abs().max() / alone_TD.abs().max())
    if not worst <= 1e-3:
        raise CheckpointError(
            f"{path}: hidden states of {type(model.hf).__name__} on packed sequences are not those of each sequence alone "
            f"(they differ by {worst:.2g} of the largest)\n    fix: use a model whose layers mix tokens by attention only"
        )


class Critic:
    """The critic on one rank: model, optimizer, counters. `values`, `train` and what saves are for all ranks together."""

    def __init__(
        self,
        config: RunConfig,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        total_optimizer_steps: int,
        vocab_size: int,
    ) -> None:
        """Load and shard it on `device`. Raises CheckpointError when its folder does not fit, or has another vocabulary."""
        self._config, self._total_steps = config, total_optimizer_steps
        self._folder = Path(config.critic.load or config.model.hf_checkpoint)
        self._model, self._stored = load_critic(self._folder, device)
        if self._model.vocab_size != vocab_size:
            raise CheckpointError(
                f"the critic has {self._model.vocab_size} token ids, the policy {vocab_size}"
                "\n    fix: pass --critic-load a model with the same tokenizer"
            )
        prepare_layers(self._model.hf, compiled=compiles_layers(config), recompute=recompute_of(config))
        shard(self._model, mesh, **sharding_of(config), keeps_gathered=keeps_gathered(config))
        self._settings = critic_optimizer(config)
        trained = {n: p for n, p in critic_tensors(self._model).items() if p.requires_grad}
        self._optimizer = ShardedAdamW(trained, self._settings, cpu_threads=offload_threads(config))
        self._loss = ValueLoss(config.critic.value_clip)
        self._skips = SkipLimit(config.train.max_skipped_steps, "the critic's ")
        self.num_steps = 0
        """Optimizer steps so far; skipped ones count."""

    @property
    def flops(self) -> SequenceFlops:
        """What a sequence costs in one forward pass."""
        return self._model.flops

    def memory(self, part: Part) -> Iterator[Tensor]:
        """What this part of it holds."""
        return weights_of(self._model) if part == "weights" else moments_of(self._optimizer)

    @torch.no_grad()
    def values(self, parts: Sequence[MicroBatch], num_entries: int) -> Tensor:
        """Values of this rank's predicted tokens on the response axis [R], 0 elsewhere."""
        found = [self._model(part) for part in parts]
        release_gathered(self._model)
        values_R = torch.zeros(num_entries)
        for part, values_N in zip(parts, found, strict=True):
            values_R[part.entries_N] = values_N.cpu()
        return values_R

    def train(
        self, steps: Sequence[Sequence[MicroBatch]], weights_R: Tensor, old_R: Tensor, returns_R: Tensor, step: int
    ) -> dict[str, float]:
        """Every optimizer step of rollout `step` towards `returns_R`; returns metrics, the same on all ranks.

        `old_R` are the values before. Raises TrainingError when too many steps in a row had to be skipped.
        """
        started = time.perf_counter()
        done: list[dict[str, float]] = []
        lr, skipped = 0.0, 0

        for parts in steps:
            outputs = (self._output(part, weights_R, old_R, returns_R) for part in parts)
            lr = learning_rate(self._settings, self.num_steps, self._total_steps)
            found, outcome = optimizer_step(self._optimizer, outputs, lr, dist.group.WORLD)
            self.num_steps += 1
            if outcome == "skipped":
                skipped += 1
                logger.warning(
                    "step %d: the critic's optimizer step skipped, gradient norm %s", step, found["grad_norm"]
                )
            if outcome == "done":
                done.append(found)
            self._skips.count(outcome, step, found.get("grad_norm", 0.0))
        means = mean_over_steps(done)
        metrics = {f"train/{name}": means[name] for name in ("value_loss", "value_clipfrac") if name in means}
        if "grad_norm" in means:
            metrics["train/critic_grad_norm"] = means["grad_norm"]
        metrics["train/critic_lr"] = lr
        metrics["train/critic_skipped_steps"] = float(skipped)
        metrics["perf/critic_train_time"] = time.perf_counter() - started
        return metrics

    def _output(self, part: MicroBatch, weights_R: Tensor, old_R: Tensor, returns_R: Tensor) -> LossOutput:
        entries_N = part.entries_N
        return self._loss(
            ValueInputs(
                values_N=self._model(part).cpu(),
                old_values_N=old_R[entries_N],
                returns_N=returns_R[entries_N],
                weights_N=weights_R[entries_N],
            )
        )

    # Checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the critic, by name: weights and moments, sharing memory with them."""
        weights = {name: tensor.detach() for name, tensor in critic_tensors(self._model).items()}
        moments = cast(dict[str, Tensor], self._optimizer.moments())
        return {f"{CRITIC}{name}": tensor for name, tensor in (weights | moments).items()}

    def state(self) -> dict[str, int]:
        """Its counters, for `restore`."""
        return {
            f"{CRITIC}optimizer_steps": self.num_steps,
            f"{CRITIC}updates": self._optimizer.num_updates,
            f"{CRITIC}skipped_in_a_row": self._skips.in_a_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take counters up, after the tensors were loaded. Raises KeyError when one is missing."""
        self.num_steps = int(state[f"{CRITIC}optimizer_steps"])
        self._optimizer.set_num_updates(int(state[f"{CRITIC}updates"]))
        self._skips.in_a_row = int(state[f"{CRITIC}skipped_in_a_row"])

    def export(self, trainer: SavedTrainer, target: Path) -> None:
        """Write the critic of a saved trainer as a folder that --critic-load takes, in place of the critic that was there.

        Raises CheckpointError when something else is there, and OSError when the disk refuses.
        """
        if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or _holds_critic(target))):
            raise CheckpointError(f"{target}: holds something else than a critic\n    fix: another --critic-save")
        written, before = (target.with_name(f".{target.name}.{part}") for part in ("next", "previous"))
        for stale in (written, before):
            shutil.rmtree(stale, ignore_errors=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in critic_tensors(self._model).items()}
        places = folder_places(self._model.hf, shapes)
        write_model_folder(self._folder, written, self._stored, lambda name: trainer.at(places[name], CRITIC))
        if target.exists():
            os.replace(target, before)
        os.replace(written, target)
        shutil.rmtree(before, ignore_errors=True)


def _holds_critic(folder: Path) -> bool:
    return (folder / "config.json").is_file() and VALUE_HEAD in stored_tensors(folder, tied=False)


def require_same_critic(folder: Path, saved: Mapping[str, Any], *, has_critic: bool) -> None:
    """Raise CheckpointError when a checkpoint with tensors `saved` has a critic and the run has none, or the other way."""
    was = any(name.startswith(CRITIC) for name in saved)
    if was and not has_critic:
        raise CheckpointError(
            f"{folder}: saved with a critic, and this run trains none"
            "\n    fix: --advantage-estimator ppo, or start anew from the policy: --hf-checkpoint CHECKPOINT/hf without --load"
        )
    if has_critic and not was:
        raise CheckpointError(
            f"{folder}: saved without a critic, and --advantage-estimator ppo trains one"
            "\n    fix: resume with the estimator that the run had, or start anew from its policy: "
            "--hf-checkpoint CHECKPOINT/hf without --load, with --num-critic-only-steps for the critic to catch up"
        )


__all__ = ["Critic", "CriticModel", "critic_tensors", "load_critic", "require_same_critic"]
