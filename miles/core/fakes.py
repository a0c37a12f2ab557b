"""An in-memory fake of every port. Each writes what happens into one shared story, so that a loop reads as a list.

```
run = fake_run(2)
asyncio.run(train(run))
run.story.events == ["publish v1", "eval before", "rollout 0 with v1", "train 0", "commit 0", "save? 0", "publish v2", ...]
```
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from miles.core.ledger import Ledger
from miles.core.ports import Metrics, RolloutBatch, Run
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.core.samples import Group, Sample
from miles.core.train_batch import Column, TrainBatch
from miles.errors import CheckpointError, MilesError


@dataclass(slots=True, kw_only=True)
class Story:
    """What happened, in order."""

    events: list[str] = field(default_factory=list[str])
    failures: Mapping[str, Exception] = field(default_factory=dict[str, Exception])
    """Errors to raise when an event happens, by the event's text."""

    def tell(self, event: str) -> None:
        """Add `event`; raises the error planned for it."""
        self.events.append(event)
        if event in self.failures:
            raise self.failures[event]


class FakeDataSource:
    """Issues groups of the prompts "prompt 0", "prompt 1", ... for ever; groups that came back go first."""

    def __init__(self, num_prompts: int = 4, n_samples_per_prompt: int = 2) -> None:
        self.num_prompts = num_prompts
        self.n_samples_per_prompt = n_samples_per_prompt
        self.next_group = 0
        self.buffer: list[Group] = []

    def get_samples(self, num_samples: int) -> list[Group]:
        taken, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(taken) < num_samples:
            taken.append(self._group(self.next_group))
            self.next_group += 1
        return taken

    def add_samples(self, groups: list[Group]) -> None:
        self.buffer.extend(groups)

    def state_dict(self) -> dict[str, Any]:
        return {"next_group": self.next_group, "buffer": [[s.to_dict() for s in group] for group in self.buffer]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_group = int(state["next_group"])
        self.buffer = [[Sample.from_dict(s) for s in group] for group in state["buffer"]]

    def __len__(self) -> int:
        return self.num_prompts

    def _group(self, group_index: int) -> Group:
        n = self.n_samples_per_prompt
        return [
            Sample(
                group_index=group_index, index=group_index * n + i, prompt=f"prompt {group_index % self.num_prompts}"
            )
            for i in range(n)
        ]


class FakePlacement:
    """Lets one phase at a time have the machine; raises MilesError when two overlap."""

    def __init__(self) -> None:
        self.phase: str | None = None

    def for_rollout(self) -> AbstractAsyncContextManager[None]:
        return self._hold("rollout")

    def for_training(self) -> AbstractAsyncContextManager[None]:
        return self._hold("training")

    def for_weight_sync(self) -> AbstractAsyncContextManager[None]:
        return self._hold("weight sync")

    def for_scoring(self) -> AbstractAsyncContextManager[None]:
        return self._hold("scoring")

    def require(self, phase: str) -> None:
        """Raise MilesError unless the machine is held for `phase`."""
        if self.phase != phase:
            raise MilesError(f"the machine is held for {self.phase or 'nothing'}, not for {phase}")

    @asynccontextmanager
    async def _hold(self, phase: str) -> AsyncGenerator[None]:
        if self.phase is not None:
            raise MilesError(f"the machine is held for {self.phase} and cannot be held for {phase}")
        self.phase = phase
        try:
            yield
        finally:
            self.phase = None


class FakeWeights:
    """Counts versions and publishes after every step."""

    def __init__(self, story: Story, placement: FakePlacement) -> None:
        self.story, self.placement = story, placement
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    async def publish(self) -> Metrics:
        async with self.placement.for_weight_sync():
            self.story.tell(f"publish v{self._version + 1}")
            self._version += 1
        return {"weights/version": float(self._version)}

    async def publish_if_due(self, step: int) -> Metrics:
        return await self.publish()


class FakeRollout:
    """Answers every prompt with two tokens, and keeps the ledger."""

    def __init__(
        self,
        story: Story,
        placement: FakePlacement,
        weights: FakeWeights,
        data_source: FakeDataSource,
        batch_size: int,
    ) -> None:
        self.story, self.placement, self.weights = story, placement, weights
        self.data_source, self.batch_size = data_source, batch_size
        self.ledger = Ledger()

    async def generate(self, step: int) -> RolloutBatch:
        self.placement.require("rollout")
        groups = self.data_source.get_samples(self.batch_size)
        indices = [group[0].group_index or 0 for group in groups]
        for group_index in indices:
            self.ledger.start(group_index)
        self.story.tell(f"rollout {step} with v{self.weights.version}")
        samples = [self._answer(sample) for group in groups for sample in group]
        for group_index in indices:
            self.ledger.finish(group_index)
        self.ledger.lease(indices)
        return RolloutBatch(
            step=step,
            data=_train_batch(samples),
            group_indices=tuple(indices),
            num_samples=len(samples),
            metrics=self.ledger.metrics(),
        )

    async def commit(self, batch: RolloutBatch) -> None:
        self.story.tell(f"commit {batch.step}")
        self.ledger.train(batch.group_indices)
        self.ledger.assert_balanced()

    async def evaluate(self, step: int) -> Metrics:
        self.story.tell(f"evaluate {step} with v{self.weights.version}")
        return {"eval/fake": 1.0}

    async def set_weight_version(self, version: int) -> None:
        self.story.tell(f"rollout knows v{version}")

    async def state_dict(self) -> dict[str, Any]:
        return {"data_source": self.data_source.state_dict(), "ledger": self.ledger.state_dict()}

    def _answer(self, sample: Sample) -> Sample:
        sample.tokens = [1, 2]
        sample.append_response([3, 4], [-0.5, -0.5], "ok", str(self.weights.version))
        sample.status = Sample.Status.COMPLETED
        sample.reward = float((sample.index or 0) % 2)
        return sample


class FakeTrainer:
    """Trains on nothing, while the machine is held for training."""

    def __init__(self, story: Story, placement: FakePlacement) -> None:
        self.story, self.placement = story, placement

    async def train(self, batch: RolloutBatch) -> Metrics:
        self.placement.require("training")
        self.story.tell(f"train {batch.step}")
        return {"train/loss": 1.0 / (batch.step + 1)}

    async def save(self, folder: str) -> None:
        self.story.tell(f"save {folder}")

    async def copy_state(self) -> None:
        self.story.tell("copy state")

    async def save_copy(self, folder: str) -> float:
        self.story.tell(f"save copy {folder}")
        return 0.0


class FakeEvaluation:
    """Is asked before training and after every step."""

    def __init__(self, story: Story) -> None:
        self.story = story

    async def before_training(self) -> None:
        self.story.tell("eval before")

    async def run_if_due(self, step: int) -> None:
        self.story.tell(f"eval? {step}")


class FakeCheckpoints:
    """Keeps the rollout's state of every step in memory."""

    def __init__(self, story: Story, rollout: FakeRollout) -> None:
        self.story, self.rollout = story, rollout
        self.saved: dict[int, dict[str, Any]] = {}

    async def save_if_due(self, step: int) -> None:
        self.story.tell(f"save? {step}")
        self.saved[step] = await self.rollout.state_dict()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Saves at once, so nothing is left to wait for."""
        yield

    def load(self, step: int) -> dict[str, Any]:
        """State saved after `step`; raises CheckpointError when there is none."""
        if step not in self.saved:
            raise CheckpointError(f"nothing was saved after step {step}; saved steps: {sorted(self.saved)}")
        return self.saved[step]


class FakeTracker:
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


class FakeEnginePool:
    """Endpoints at which nothing listens."""

    def __init__(self, num_engines: int = 1) -> None:
        self.num_engines = num_engines

    def engines(self) -> Sequence[EngineEndpoint]:
        return [
            EngineEndpoint(url=f"http://127.0.0.1:{i + 1}", engine_id=f"engine-{i}", pid=0, token="fake")
            for i in range(self.num_engines)
        ]

    def router(self) -> RouterEndpoint:
        return RouterEndpoint(url="http://127.0.0.1:9", pid=0, token="fake")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRun(Run):
    """A `Run` of fakes, with their own types and the story they tell."""

    rollout: FakeRollout
    trainer: FakeTrainer
    weights: FakeWeights
    evaluation: FakeEvaluation
    checkpoints: FakeCheckpoints
    placement: FakePlacement
    tracker: FakeTracker
    story: Story


def fake_run(
    num_steps: int,
    events: list[str] | None = None,
    *,
    start: int = 0,
    batch_size: int = 2,
    n_samples_per_prompt: int = 2,
    failures: Mapping[str, Exception] | None = None,
) -> FakeRun:
    """A run of fakes over the steps `start` to `num_steps` - 1.

    `events` is the list the story is written to; `failures` maps an event, such as "train 1", to the error raised when
    it happens.
    """
    story = Story(events=[] if events is None else events, failures=failures or {})
    placement = FakePlacement()
    weights = FakeWeights(story, placement)
    rollout = FakeRollout(
        story, placement, weights, FakeDataSource(n_samples_per_prompt=n_samples_per_prompt), batch_size
    )
    return FakeRun(
        steps=range(start, num_steps),
        rollout=rollout,
        trainer=FakeTrainer(story, placement),
        weights=weights,
        evaluation=FakeEvaluation(story),
        checkpoints=FakeCheckpoints(story, rollout),
        placement=placement,
        tracker=FakeTracker(),
        story=story,
    )


def _train_batch(samples: Sequence[Sample]) -> TrainBatch:
    return TrainBatch(
        columns={
            "tokens": Column.from_rows([s.tokens for s in samples], "token", "int64"),
            "loss_mask": Column.from_rows([[1] * s.response_length for s in samples], "response"),
            "rollout_log_probs": Column.from_rows([s.rollout_log_probs for s in samples], "response"),
            "sample_index": Column.from_rows([s.index for s in samples], "sample", "int64"),
            "trajectory": Column.from_rows([s.trajectory for s in samples], "sample", "int64"),
            "reward": Column.from_rows([s.get_reward_value(None) for s in samples], "sample"),
        }
    )
