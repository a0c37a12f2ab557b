"""Where a run starts and how many steps it has: from the beginning or a checkpoint, and what a user must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.changes import changed_settings
from miles.config.resources import saves
from miles.config.schema import RunConfig
from miles.errors import ConfigError, Issue
from miles.utils import checkpoint_folder, run_record
from miles.utils.run_record import RunRecord


@dataclass(frozen=True)
class Resumed:
    """What a run starts from: the beginning, or a checkpoint."""

    folder: Path | None
    next_step: int
    weight_version: int
    rollout: dict[str, Any] | None
    record: RunRecord | None = None
    """Whose the checkpoint is, and its settings; None at the beginning."""


def resume_point(load: str | None) -> Resumed:
    """Read the checkpoint that `--load` names, if it does; a run starts after it, or at step 0 when its folder is empty."""
    if not load:
        return Resumed(None, 0, 0, None)
    folder = checkpoint_folder.resolve(load)
    if folder is None:
        return Resumed(None, 0, 0, None)
    state = checkpoint_folder.read_state(folder)
    record = run_record.read(folder)
    return Resumed(folder, state["next_step"], state["weight_version"], state["rollout"], record)


def resume_notes(load: str | None, start_from: Resumed) -> list[str]:
    """What a user who gave `--load` must know: checkpoints that are passed over, and where the run starts."""
    if not load:
        return []
    skipped = [f"skipped: {text}" for text in checkpoint_folder.skipped(load)]
    if start_from.folder is None:
        return [*skipped, f"{load} holds no complete checkpoint yet: starting from --hf-checkpoint at step 0"]
    return [*skipped, f"resuming from {start_from.folder}, after {start_from.next_step} steps"]


def checkpoints_of(config: RunConfig, run_dir: Path) -> Path:
    """The folder that the run's checkpoints are saved to."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir / "checkpoints"


def differences(config: RunConfig, run_dir: Path, start_from: Resumed) -> list[str]:
    """What a user who resumes must know: settings that are others now, and later checkpoints that the run saves beside."""
    changed = changed_settings(start_from.record.settings, config) if start_from.record else []
    later = run_record.later(checkpoints_of(config, run_dir), start_from.folder) if start_from.folder else None
    return [*changed, later] if later and saves(config) else changed


def steps_of_epochs(config: RunConfig, num_prompts: int | None) -> int:
    """Rollout steps of `--num-epoch` passes over `num_prompts`; raises ConfigError when that is none."""
    if num_prompts is None:
        problem = f"{config.data.source_path} has no length, so an epoch is not defined"
        raise ConfigError([Issue("rollout.num_epoch", problem, "set --num-rollout instead")])
    steps = num_prompts // config.rollout.batch_size * (config.rollout.num_epoch or 0)
    if not steps:
        problem = f"{num_prompts} prompts do not fill one step of {config.rollout.batch_size}"
        raise ConfigError(
            [Issue("rollout.batch_size", problem, f"set --rollout-batch-size {max(num_prompts, 1)} or less")]
        )
    return steps


def epochs_in_words(config: RunConfig, num_prompts: int, steps: int) -> str:
    """How `--num-epoch` became steps: `3 epochs of 100 prompts, 32 a step, are 9 steps; they take 288 of the 300 prompts`."""
    epochs, batch = config.rollout.num_epoch or 0, config.rollout.batch_size
    text = (
        f"{epochs} {'epoch' if epochs == 1 else 'epochs'} of {num_prompts} prompts, {batch} a step, are {steps} steps"
    )
    wanted, taken = epochs * num_prompts, steps * batch
    return text if taken == wanted else f"{text}; they take {taken} of the {wanted} prompts"


def steps_left(next_step: int, num_rollout: int) -> range:
    """Steps from `next_step` to the end of the run; raises ConfigError when a checkpoint is at or past it."""
    if next_step >= num_rollout:
        problem = f"the checkpoint is after step {next_step} and the run has {num_rollout}: nothing is left to do"
        raise ConfigError([Issue("rollout.num_rollout", problem, "raise --num-rollout, which counts from step 0")])
    return range(next_step, num_rollout)
