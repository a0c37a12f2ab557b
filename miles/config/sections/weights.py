"""Settings of saved and published weights, and of the proofs about them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from miles.config.base import ConfigModel, Flag


class CheckpointConfig(ConfigModel):
    """Saving and resuming."""

    save: Annotated[str | None, Flag("--save")] = None
    """Folder of checkpoints; unset takes RUN_DIR/checkpoints. One that holds another run's is refused."""
    save_interval: Annotated[PositiveInt | None, Flag("--save-interval")] = None
    """Save every so many steps and after the last; unset saves only when `--save-trigger-sentinel` asks for it."""
    save_trigger_sentinel: Annotated[str | None, Flag("--save-trigger-sentinel")] = None
    """File by which a checkpoint is asked for: when it exists after a step's training, the run saves and deletes it."""
    keep_last: Annotated[PositiveInt | None, Flag("--keep-last")] = None
    """Complete checkpoints to keep: each save removes older ones beyond so many, but never the one that the run was loaded from; unset keeps all."""
    save_hf: Annotated[bool, Flag("--save-hf")] = True
    """Put the model in Hugging Face format into every checkpoint, under `hf/`."""
    async_save: Annotated[bool, Flag("--async-save")] = False
    """Write checkpoints while the run goes on, from a copy in memory; one that was not finished when the run died is ignored."""
    load: Annotated[str | None, Flag("--load")] = None
    """Checkpoint to resume from: a folder of checkpoints (its latest complete one) or one `iter_*` folder."""


class WeightsConfig(ConfigModel):
    """How weights reach the engines."""

    transport: Annotated[Literal["tensor", "broadcast", "disk"] | None, Flag("--update-weight-transfer-mode")] = None
    """`tensor` shares memory with engines of this machine, `broadcast` sends through a process group, `disk` through a folder that both sides see; unset is `tensor`, and `disk` with `--rollout-external`."""
    disk_dir: Annotated[str | None, Flag("--update-weight-disk-dir")] = None
    """Folder of the `disk` transport and of the check through disk; unset takes RUN_DIR/weights."""
    mode: Annotated[Literal["drain", "in_place", "retract"], Flag("--pause-generation-mode")] = "drain"
    """Requests in flight during an update: `drain` ends and resubmits them with their tokens so far, `in_place` keeps their KV, `retract` computes it anew."""
    buffer_size: Annotated[PositiveInt, Flag("--update-weight-buffer-size")] = 512 * 1024**2
    """Bytes of weights sent to an engine at a time."""
    verify: bool = True
    """Prove that engines hold what the trainer has: every parameter is sent (at start), names, bytes and checksums agree (each update), a second load path agrees (`reload_interval`)."""
    reload_interval: NonNegativeInt = 10
    """Updates between two proofs by which one engine loads the same weights another way (from disk; from memory with the `disk` transport) and must report equal checksums; 0 never does."""


class ParityConfig(ConfigModel):
    """The gate that compares the log-probabilities of trainer and engine."""

    enabled: bool = True
    """Stop the run when trainer and engine assign different log-probabilities to the same tokens."""
    max_mean_diff: PositiveFloat | None = None
    """Largest mean absolute difference of log-probabilities; unset takes 1e-3 when trainer and engines compute in fp32, else 0.06, or 0.15 for a mixture of experts, where beyond it the run warns and goes on."""
    max_p99_diff: PositiveFloat | None = None
    """Largest 99th percentile of the absolute difference; unset takes 1e-2 in fp32, else 0.3, or 1.5 for a mixture of experts."""
    num_probes: PositiveInt = 4
    """Fixed probe sequences scored by engine and trainer after a publish."""
    interval: PositiveInt = 10
    """Publishes between two probe comparisons; the first is always compared."""
