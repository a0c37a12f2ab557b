"""A trainer rank's checkpoints: saving, the copy that is written beside training, loading, and the export of the model."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from miles.backends.fsdp_utils.checkpoint import MODEL, RankState, SavedTrainer, load_trainer
from miles.backends.fsdp_utils.critic import require_same_critic
from miles.backends.fsdp_utils.hf_folder import require_same_names, write_model_folder
from miles.backends.fsdp_utils.model import folder_places
from miles.backends.fsdp_utils.policy_steps import PolicySteps
from miles.backends.fsdp_utils.roles import Roles
from miles.config.schema import RunConfig
from miles.errors import CheckpointError
from miles.utils.checkpoint_folder import cannot_write


class TrainerState:
    """What a trainer rank must go on from: weights, moments, counters, random state."""

    def __init__(
        self, config: RunConfig, roles: Roles, steps: PolicySteps, *, rank: int, world_size: int, threads: int
    ) -> None:
        self._config, self._roles, self._steps = config, roles, steps
        self._rank, self._world_size, self._threads = rank, world_size, threads
        self._copy: RankState | None = None

    def save(self, folder: Path) -> None:
        """Write this rank's part into `folder`. Raises CheckpointError when the disk refuses."""
        self._now().write(folder)

    def copy(self) -> None:
        """Copy what `save` would write now, for `write_copy`."""
        self._copy = self._now().copied()

    def write_copy(self, folder: Path) -> float:
        """Write the copy and forget it; returns the seconds it took. Raises CheckpointError when the disk refuses."""
        started = time.perf_counter()
        state, self._copy = self._copy, None
        assert state is not None
        state.write(folder)
        return time.perf_counter() - started

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises CheckpointError when it is incomplete, of another version or model, or would not end in the same bits
        though the run is deterministic.
        """
        roles = self._roles
        with SavedTrainer(folder) as saved:
            require_same_critic(folder, saved.shapes, has_critic=roles.critic is not None)
        with torch.no_grad():
            tensors = roles.checkpoint_tensors()
            state = load_trainer(folder, tensors, rank=self._rank, world_size=self._world_size)
        try:
            saved_with = {
                "--train-ranks": int(state["ranks"]),
                "--torch-threads": int(state["threads"]),
                "--fsdp-cpu-offload": _word(state.get("cpu_offload", 0)),
            }
            self._steps.num_steps = int(state["optimizer_steps"])
            self._steps.skips.in_a_row = int(state["skipped_in_a_row"])
            roles.optimizer.set_num_updates(int(state["updates"]))
            if roles.critic is not None:
                roles.critic.restore(state)
        except KeyError as error:
            raise CheckpointError(
                f"{folder}: trainer.json lacks {error}\n    fix: resume from an older checkpoint"
            ) from error
        here = (self._world_size, self._threads, _word(self._config.train.cpu_offload))
        for (flag, before), now in zip(saved_with.items(), here, strict=True):
            if self._config.run.deterministic and before != now:
                raise CheckpointError(
                    f"{folder}: saved with {flag} {before}, and this run has {now}: it would not end in the same bits"
                    f"\n    fix: {flag} {before}, or leave out --deterministic-mode"
                )

    def export_hf(self, saved: Path, folder: Path) -> None:
        """Write the model that all ranks put into `saved` in Hugging Face format, and the critic to --critic-save.

        Raises CheckpointError when `folder` is not empty, or the disk refuses.
        """
        stored, source = self._roles.stored, Path(self._config.model.hf_checkpoint)
        with SavedTrainer(saved) as trainer:
            shapes = {n.removeprefix(MODEL): shape for n, shape in trainer.shapes.items() if n.startswith(MODEL)}
            places = folder_places(self._roles.policy.hf, shapes)
            require_same_names(places, stored)
            try:
                write_model_folder(source, folder, stored, lambda name: trainer.at(places[name], MODEL))
            except OSError as error:
                raise cannot_write(folder, error) from error
            critic, critic_folder = self._roles.critic, self._config.critic.save
            if critic is not None and critic_folder is not None:
                try:
                    critic.export(trainer, Path(critic_folder))
                except OSError as error:
                    raise cannot_write(Path(critic_folder), error) from error

    def _now(self) -> RankState:
        roles = self._roles
        state = {
            "optimizer_steps": self._steps.num_steps,
            "updates": roles.optimizer.num_updates,
            "skipped_in_a_row": self._steps.skips.in_a_row,
            "ranks": self._world_size,
            "threads": self._threads,
            "cpu_offload": int(self._config.train.cpu_offload),
            **({} if roles.critic is None else roles.critic.state()),
        }
        return RankState.of(roles.checkpoint_tensors(), state, rank=self._rank, world_size=self._world_size)


def _word(on: object) -> str:
    return "true" if on else "false"


__all__ = ["TrainerState"]
