"""The ports: what the driver and the rooms ask of each other. `core/fakes.py` has an in-memory one of each.

One step of the loop: `RolloutFn` collects groups from a `DataSource` (with a `GenerateFn`, a `RewardFn` and a
`DynamicFilter` inside), a `Rollout` turns them into a `TrainBatch`, a `Trainer` learns from it, a `WeightPublisher`
brings the new weights to the `EnginePool`, and a `Tracker` writes down what happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.core.samples import Group, Sample
from miles.core.train_batch import TrainBatch

Metrics = dict[str, float]


class DataSource(Protocol):
    """Issues prompt groups; also takes groups back."""

    def get_samples(self, num_samples: int) -> list[Group]:
        """Exactly `num_samples` groups of n samples each, with `group_index` and `index` set; wraps at an epoch's end."""
        ...

    def add_samples(self, groups: list[Group]) -> None:
        """Take groups back into the buffer; they are issued again first."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready position and buffer."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        ...

    def __len__(self) -> int:
        """Prompts in one epoch."""
        ...


class RewardFn(Protocol):
    """Judges one sample."""

    async def __call__(self, args: Any, sample: Sample) -> float | dict[str, Any]: ...


class DynamicFilter(Protocol):
    """Keeps or drops a finished group."""

    def __call__(self, args: Any, group: Group) -> Any: ...


class GenerateFn(Protocol):
    """Turns one prompt into one sample, or into several of one trajectory; see `rollout/base_types.py` for the records."""

    async def __call__(self, input: Any) -> Any: ...


class RolloutFn(Protocol):
    """Collects a training batch or evaluates; see `rollout/base_types.py` for the records."""

    async def __call__(self, input: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """One collected batch: what the trainer gets, and the ledger's receipt for it."""

    step: int
    data: Any
    """A `TrainBatch`; or, from an actor, a list of one reference to it in the object store."""
    group_indices: tuple[int, ...]
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Rollout(Protocol):
    """The rollout manager as the driver sees it."""

    async def generate(self, step: int) -> RolloutBatch:
        """Collect the batch of `step`; its groups are leased until `commit`."""
        ...

    async def commit(self, batch: RolloutBatch) -> None:
        """Every optimizer step of `batch` is done: its groups are trained."""
        ...

    async def evaluate(self, step: int) -> Metrics:
        """Evaluate all datasets with the weights that the engines hold."""
        ...

    async def set_weight_version(self, version: int) -> None:
        """Tell the manager which version the engines hold."""
        ...

    async def state_dict(self) -> dict[str, Any]:
        """JSON-ready state of data source, buffer and ledger."""
        ...


class Trainer(Protocol):
    """All trainer ranks and roles behind one face."""

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Run every optimizer step of `batch`; returns reduced metrics."""
        ...

    async def save(self, folder: str) -> None:
        """Write model, optimizer, schedule and random state into `folder`."""
        ...

    async def copy_state(self) -> None:
        """Copy what `save` would write now into memory, for `save_copy`; training may go on."""
        ...

    async def save_copy(self, folder: str) -> float:
        """Write what `copy_state` copied into `folder`, beside training; returns the seconds it took."""
        ...


class EnginePool(Protocol):
    """The engines of one served model and their router."""

    def engines(self) -> Sequence[EngineEndpoint]:
        """Endpoints of the engines alive now."""
        ...

    def router(self) -> RouterEndpoint:
        """The router in front of them."""
        ...


class WeightPublisher(Protocol):
    """Brings the trainer's weights to the engines and proves that they arrived. Owns the weight version."""

    @property
    def version(self) -> int:
        """Version that the engines hold; 0 before the first publish."""
        ...

    async def publish(self) -> Metrics:
        """Send the trainer's weights as the next version."""
        ...

    async def publish_if_due(self, step: int) -> Metrics:
        """Publish after `step` if this run does so then."""
        ...


class Placement(Protocol):
    """Who may use the machine when."""

    def for_rollout(self) -> AbstractAsyncContextManager[None]: ...

    def for_training(self) -> AbstractAsyncContextManager[None]: ...

    def for_weight_sync(self) -> AbstractAsyncContextManager[None]: ...

    def for_scoring(self) -> AbstractAsyncContextManager[None]: ...


class Evaluation(Protocol):
    """Evaluation on an interval."""

    async def before_training(self) -> None: ...

    async def run_if_due(self, step: int) -> None: ...


class Checkpoints(Protocol):
    """Complete checkpoints on an interval."""

    async def save_if_due(self, step: int) -> None: ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Around the run: its end waits for a checkpoint that is still being written."""
        ...


class Tracker(Protocol):
    """Writes metrics down, each step durably before the next."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run, as the driver holds them."""

    steps: range
    rollout: Rollout
    trainer: Trainer
    weights: WeightPublisher
    evaluation: Evaluation
    checkpoints: Checkpoints
    placement: Placement
    tracker: Tracker


__all__ = [
    "Checkpoints",
    "DataSource",
    "DynamicFilter",
    "EnginePool",
    "Evaluation",
    "GenerateFn",
    "Metrics",
    "Placement",
    "RewardFn",
    "Rollout",
    "RolloutBatch",
    "RolloutFn",
    "Run",
    "Tracker",
    "TrainBatch",
    "Trainer",
    "WeightPublisher",
]
