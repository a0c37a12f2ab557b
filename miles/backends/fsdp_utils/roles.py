"""The models of one trainer rank: the policy, and the reference and critic of the runs that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from miles.backends.fsdp_utils.checkpoint import MODEL
from miles.backends.fsdp_utils.critic import Critic
from miles.backends.fsdp_utils.layers import prepare_layers
from miles.backends.fsdp_utils.model import PolicyModel, hf_tensors, load_policy, shard, sharding_of
from miles.backends.fsdp_utils.optimizer import ShardedAdamW
from miles.backends.fsdp_utils.tensor_file import StoredTensor
from miles.config.compute import compiles_layers, keeps_gathered, recompute_of
from miles.config.resources import offload_threads, trains_critic
from miles.config.schema import RunConfig
from miles.errors import CheckpointError

KEPT_LOGITS = 1 / 16
"""Share of a GPU's memory for logits that are kept from the forward to the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """Sharded models, and what trains the policy; the critic brings its own optimizer."""

    device: torch.device
    """Where they compute."""
    policy: PolicyModel
    optimizer: ShardedAdamW
    stored: Mapping[str, StoredTensor]
    """The tensors of the folder that the policy was loaded from."""
    reference: PolicyModel | None
    critic: Critic | None

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Weights and moments of policy and critic by their names in a checkpoint, sharing memory with them."""
        model = {f"{MODEL}{name}": tensor.detach() for name, tensor in hf_tensors(self.policy).items()}
        critic = {} if self.critic is None else self.critic.tensors()
        return model | cast(dict[str, Tensor], self.optimizer.moments()) | critic


def prepare_roles(
    config: RunConfig,
    policy: PolicyModel,
    stored: Mapping[str, StoredTensor],
    mesh: DeviceMesh,
    *,
    total_optimizer_steps: int,
) -> Roles:
    """Shard a loaded policy over `mesh`, and load the other roles beside it, on its device.

    Raises CheckpointError when the folder of another role is missing, or has another vocabulary.
    """
    device = next(policy.parameters()).device
    _prepare_policy(config, policy, mesh, device)
    trained = {n: p for n, p in hf_tensors(policy).items() if p.requires_grad}
    optimizer = ShardedAdamW(trained, config.optimizer, cpu_threads=offload_threads(config))
    reference = critic = None
    if (config.algorithm.use_kl_loss or config.algorithm.kl_coef) and config.algorithm.loss_type != "sft_loss":
        reference = _load_reference(config, mesh, device, vocab_size=policy.vocab_size)
    if trains_critic(config):
        critic = Critic(
            config, mesh, device, total_optimizer_steps=total_optimizer_steps, vocab_size=policy.vocab_size
        )
    return Roles(device=device, policy=policy, optimizer=optimizer, stored=stored, reference=reference, critic=critic)


def _prepare_policy(config: RunConfig, policy: PolicyModel, mesh: DeviceMesh, device: torch.device) -> None:
    prepare_layers(policy.hf, compiled=compiles_layers(config), recompute=recompute_of(config))
    shard(policy, mesh, **sharding_of(config), keeps_gathered=keeps_gathered(config))
    if device.type == "cuda" and recompute_of(config) != "full":
        memory = torch.cuda.get_device_properties(device).total_memory
        policy.kept_logit_bytes = int(memory * KEPT_LOGITS)


def _load_reference(config: RunConfig, mesh: DeviceMesh, device: torch.device, *, vocab_size: int) -> PolicyModel:
    reference, _ = load_policy(config.model.ref_load or config.model.hf_checkpoint, device)
    if reference.vocab_size != vocab_size:
        raise CheckpointError(
            f"the reference model has {reference.vocab_size} token ids, the policy {vocab_size}"
            "\n    fix: pass --ref-load a model with the same tokenizer"
        )
    reference.requires_grad_(False)
    prepare_layers(reference.hf, compiled=compiles_layers(config), recompute="none")
    shard(reference, mesh, **sharding_of(config))
    return reference


__all__ = ["Roles", "prepare_roles"]
