"""Settings of the trainer: steps, batches, optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from miles.config.base import ConfigModel, Flag

Fraction = Annotated[float, Field(ge=0, le=1)]
Recompute = Literal["none", "selective", "full"]


class TrainConfig(ConfigModel):
    """How a rollout batch becomes optimizer steps."""

    backend: Annotated[Literal["fsdp"], Flag("--train-backend")] = "fsdp"
    """Which trainer runs the optimizer steps."""
    bf16: Annotated[bool, Flag("--bf16")] = False
    """Compute in bfloat16 over fp32 master weights, moments and gradient sums; off computes in fp32."""
    compile_layers: Annotated[bool | None, Flag("--compile-layers")] = None
    """Compile the decoder layers, which takes up to a minute at start and makes steps faster; unset does so on a GPU."""
    recompute: Annotated[Recompute, Flag("--recompute")] = "none"
    """What the backward pass computes again in place of keeping it: `none`, `selective` (layers without attention) or `full` (whole layers)."""
    cpu_offload: Annotated[bool, Flag("--fsdp-cpu-offload")] = False
    """Keep weights, gradients and moments in the CPU's memory, where AdamW then runs; a GPU gets the weights of a few layers at a time."""
    global_batch_size: Annotated[PositiveInt | None, Flag("--global-batch-size")] = None
    """Samples per optimizer step, over all ranks; derived when `--num-steps-per-rollout` is given, and one step per rollout when neither is."""
    num_steps_per_rollout: Annotated[PositiveInt | None, Flag("--num-steps-per-rollout")] = None
    """Optimizer steps made from one rollout batch."""
    allow_partial_train_step: Annotated[bool, Flag("--allow-partial-train-step")] = False
    """Train on what `--global-batch-size` leaves over of a rollout in a smaller last step; off refuses such a rollout."""
    use_dynamic_global_batch_size: Annotated[bool, Flag("--use-dynamic-global-batch-size")] = False
    """Cut each rollout into `--num-steps-per-rollout` steps of about equal size, however many samples it returned."""
    max_tokens_per_gpu: Annotated[PositiveInt, Flag("--max-tokens-per-gpu")] = 8192
    """Tokens that one rank processes in one micro-batch; there is no padding. The result does not depend on it."""
    balance_data: Annotated[bool, Flag("--balance-data")] = False
    """Share micro-batches out so that ranks have about equally many tokens; off deals them in turn, the largest first."""
    balance_by_flops: Annotated[bool, Flag("--balance-by-flops")] = False
    """As `--balance-data`, by the operations that policy and critic of this size need, which grow faster than tokens do."""
    seed: Annotated[int, Flag("--seed")] = 1234
    """Seed of the trainer's random state."""
    max_skipped_steps: NonNegativeInt = 3
    """Optimizer steps in a row that may be skipped because loss or gradient norm is not finite; one more stops the run."""


class OptimizerConfig(ConfigModel):
    """AdamW and its learning rate."""

    lr: Annotated[NonNegativeFloat, Flag("--lr")] = 1e-6
    """Learning rate after warm-up."""
    min_lr: Annotated[NonNegativeFloat, Flag("--min-lr")] = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine"], Flag("--lr-decay-style")] = "constant"
    """Shape of the decay."""
    lr_decay_iters: Annotated[PositiveInt | None, Flag("--lr-decay-iters")] = None
    """Optimizer steps until the decay ends, warm-up included; unset takes the run's length."""
    lr_warmup_iters: Annotated[NonNegativeInt, Flag("--lr-warmup-iters")] = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: Annotated[NonNegativeFloat, Flag("--weight-decay")] = 0.0
    """Decoupled weight decay of AdamW; not applied to biases and norms."""
    adam_beta1: Annotated[Fraction, Flag("--adam-beta1")] = 0.9
    """AdamW's decay of the gradient mean."""
    adam_beta2: Annotated[Fraction, Flag("--adam-beta2")] = 0.95
    """AdamW's decay of the squared gradient."""
    adam_eps: Annotated[PositiveFloat, Flag("--adam-eps")] = 1e-8
    """AdamW's term against division by zero."""
    clip_grad: Annotated[NonNegativeFloat, Flag("--clip-grad")] = 1.0
    """Largest global gradient norm; 0 does not clip."""
