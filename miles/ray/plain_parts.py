"""Parts of a run that have little to do: one machine for all, no trainer, nothing to publish."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from miles.core.ports import Metrics, RolloutBatch
from miles.core.run_facts import EngineEndpoint
from miles.errors import CheckpointError


class SharedMachine:
    """Placement of a run whose trainer and engines take turns on the same cores: nothing has to move."""

    def for_rollout(self) -> Any:
        """Nothing to do before generation."""
        return nullcontext()

    def for_training(self) -> Any:
        """Nothing to do before training."""
        return nullcontext()

    def for_weight_sync(self) -> Any:
        """Nothing to do before a weight update."""
        return nullcontext()

    def for_scoring(self) -> Any:
        """Nothing to do before the trainer scores sequences between two steps."""
        return nullcontext()


class NothingToPublish:
    """Weights of a run without engines or without a trainer: there is nobody to publish to, or nothing to publish."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def set_engines(self, engines: Sequence[EngineEndpoint]) -> None:
        """Nothing will be sent to them."""

    async def bring_up(self, engine: EngineEndpoint) -> bool:
        """An engine serves the weights of the model folder."""
        return True

    async def publish(self) -> Metrics:
        """Nothing."""
        return {}

    async def publish_if_due(self, step: int) -> Metrics:
        """Nothing."""
        return {}


class NoTrainer:
    """Trainer of a run that only generates: a batch is reported and forgotten."""

    async def train(self, batch: RolloutBatch) -> Metrics:
        """The batch's metrics."""
        return {**batch.metrics, "perf/train_time": 0.0}

    async def save(self, folder: str) -> None:
        """Raises CheckpointError: there is nothing to save."""
        raise CheckpointError(f"{folder}: this run has no trainer whose state could be saved")
