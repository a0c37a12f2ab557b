"""The records that rollout and generate functions take and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.core.ledger import Ledger
from miles.core.ports import DataSource
from miles.core.samples import Sample

if TYPE_CHECKING:
    from miles.rollout.inference_rollout.state import GenerateState

RolloutGroup = list[Any]
"""Results of one prompt: a `Sample` each, or a `list[Sample]` where one trajectory became several samples."""


@dataclass(frozen=True, slots=True)
class RolloutFnConstructorInput:
    """What a rollout class is built with."""

    args: Any
    data_source: DataSource
    ledger: Ledger | None = None
    """Where groups are noted as they start, finish, are dropped, fail or go back; None keeps no account."""


@dataclass(frozen=True, slots=True)
class RolloutFnTrainInput:
    """One request for a training batch."""

    rollout_id: int
    weight_version: int | None = None
    """Version that the engines hold."""

    @property
    def evaluation(self) -> bool:
        """False: tells this record from `RolloutFnEvalInput`."""
        return False


@dataclass(frozen=True, slots=True)
class RolloutFnEvalInput:
    """One request for an evaluation."""

    rollout_id: int
    generate_state: GenerateState | None = None
    """State of other engines to evaluate on; None takes the rollout's own."""
    weight_version: int | None = None
    hf_dir: str | None = None
    """Folder of the evaluated weights, where they were exported."""

    @property
    def evaluation(self) -> bool:
        """True: tells this record from `RolloutFnTrainInput`."""
        return True


@dataclass(frozen=True, slots=True)
class RolloutFnTrainOutput:
    """Finished groups, and metrics about how they were collected."""

    samples: list[RolloutGroup]
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class RolloutFnEvalOutput:
    """Results by dataset, `{name: {"rewards": [...], "truncated": [...], "samples": [...]}}`, and metrics."""

    data: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class GenerateFnInput:
    """One prompt to generate for."""

    state: GenerateState
    sample: Sample
    """Holds the prompt and, in `tokens`, its ids; the function fills it in, or returns others."""
    sampling_params: dict[str, Any] = field(default_factory=dict[str, Any])
    """A copy of its own, complete: temperature, top_p, ..., sampling_seed."""
    evaluation: bool = False

    @property
    def args(self) -> Any:
        """Settings of the run."""
        return self.state.args


@dataclass(frozen=True, slots=True)
class GenerateFnOutput:
    """One finished sample, or several that form one trajectory."""

    samples: Sample | list[Sample]
