"""From a run's settings to what its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.config.batch_math import derive_batch_plan
from miles.config.compute import compiles_layers, recompute_of
from miles.config.memory import EngineNeeds, Needs, TrainerNeeds
from miles.config.model_size import ModelSize, model_size
from miles.config.resources import (
    GpuMemory,
    engine_backend,
    engine_dtype,
    gpu_plan,
    memory_of_gpu,
    num_started_engines,
    num_train_ranks,
    offloaded_by_engines,
    offloads_train,
    trains_critic,
)
from miles.config.schema import RunConfig
from miles.errors import Issue
from miles.utils.model_dtype import model_config

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def needs_of(cfg: RunConfig) -> Needs | None:
    """What the memory of a run depends on; None when its model's size is not known."""
    model = model_size(cfg.model.hf_checkpoint)
    if model is None:
        return None
    trainer = _trainer(cfg, model) if num_train_ranks(cfg) else None
    engine = _engine(cfg, model) if num_started_engines(cfg) else None
    return Needs(
        trainer=trainer,
        engine=engine,
        engines=num_started_engines(cfg),
        shares=cfg.cluster.colocate,
        offloads_train=offloads_train(cfg),
        given_up=frozenset(offloaded_by_engines(cfg)),
        bucket_bytes=cfg.weights.buffer_size,
    )


def _trainer(cfg: RunConfig, model: ModelSize) -> TrainerNeeds:
    is_sft, tokens = cfg.algorithm.loss_type == "sft_loss", cfg.train.max_tokens_per_gpu
    reads_reference = bool(cfg.algorithm.use_kl_loss or cfg.algorithm.kl_coef) and not is_sft
    most = _tokens_of_a_step(cfg)
    return TrainerNeeds(
        policy=model,
        reference=model_size(cfg.model.ref_load or cfg.model.hf_checkpoint) if reads_reference else None,
        critic=model_size(cfg.critic.load or cfg.model.hf_checkpoint) if trains_critic(cfg) else None,
        ranks=num_train_ranks(cfg),
        bf16=cfg.train.bf16,
        compiled=compiles_layers(cfg),
        recompute=recompute_of(cfg),
        tokens=tokens if most is None else min(tokens, most),
        longest=_surely(cfg),
        several=most is None or most > tokens,
        whole_logits=cfg.algorithm.loss_type == "custom_loss",
        cpu_offload=cfg.train.cpu_offload,
    )


def _bound(cfg: RunConfig) -> int | None:
    """Tokens of the longest sequence, where the settings bound prompt and response together."""
    bounds = [cfg.rollout.max_context_len]
    if cfg.rollout.max_prompt_len is not None and cfg.algorithm.loss_type != "sft_loss":
        bounds.append(cfg.rollout.max_prompt_len + cfg.rollout.max_response_len)
    return min((bound for bound in bounds if bound is not None), default=None)


def _surely(cfg: RunConfig) -> int:
    """Tokens that a sequence can have by the settings alone: prompt and response where they are bounded, else the response."""
    if cfg.algorithm.loss_type == "sft_loss":
        return _bound(cfg) or 1
    return _bound(cfg) or cfg.rollout.max_response_len


def _tokens_of_a_step(cfg: RunConfig) -> int | None:
    """Tokens at most that one rank sees in an optimizer step."""
    plan = derive_batch_plan(
        rollout_batch_size=cfg.rollout.batch_size,
        n_samples_per_prompt=cfg.rollout.n_samples_per_prompt,
        global_batch_size=cfg.train.global_batch_size,
        num_steps_per_rollout=cfg.train.num_steps_per_rollout,
        allow_partial=cfg.train.allow_partial_train_step,
        dynamic=cfg.train.use_dynamic_global_batch_size,
    )
    positions = model_config(cfg.model.hf_checkpoint).get("max_position_embeddings")
    longest = _bound(cfg) or (positions if isinstance(positions, int) else None)
    if isinstance(plan, Issue) or longest is None:
        return None
    return -(-plan.global_batch_size // max(1, num_train_ranks(cfg))) * longest


def _engine(cfg: RunConfig, model: ModelSize) -> EngineNeeds | None:
    if engine_backend(cfg) != "sglang":
        return None  # the torch engine takes what its requests need
    given = cfg.engine.sglang
    prefill = _number(given.get("chunked_prefill_size"))
    return EngineNeeds(
        model=model,
        itemsize=BYTES[engine_dtype(cfg)],
        tp=cfg.engine.gpus_per_engine,
        fraction=_number(given.get("mem_fraction_static")),
        max_running_requests=cfg.engine.max_running_requests,
        prefill_tokens=int(prefill) if prefill and prefill > 0 else None,
        saves_memory=bool(offloaded_by_engines(cfg)),
        longest=_surely(cfg),
    )


def _number(value: Any) -> float | None:
    """A server argument as a number; None for what is none, which SGLang itself will tell."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Room:
    """The GPU of the run with the least memory: its name, its bytes, and what other processes have of them."""

    gpu: str
    memory: GpuMemory

    @property
    def free(self) -> int:
        """Bytes that the run can have."""
        return self.memory.total - self.memory.used


def room_of(cfg: RunConfig) -> Room | None:
    """The tightest of the GPUs that the run takes; None when nothing tells how large they are."""
    plan = gpu_plan(cfg)
    names = dict.fromkeys(name for gpus in (*plan.train, *plan.engines) for name in gpus)
    rooms = [Room(name, memory) for name in names if (memory := memory_of_gpu(name)) is not None]
    return min(rooms, key=lambda room: room.free, default=None)
