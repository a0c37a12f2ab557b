"""What goes into a loss and what comes out, for one micro-batch."""

# N predicted tokens of the micro-batch, V vocabulary, R response tokens of its samples end to end

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleLayout:
    """Which samples a micro-batch has, for users' functions that look at whole responses."""

    total_lengths: list[int]
    """Tokens of prompt and response of each sample."""
    response_lengths: list[int]
    places_N: Tensor
    """Where each predicted token is among the response tokens of all samples end to end."""

    @property
    def num_places(self) -> int:
        """R."""
        return sum(self.response_lengths)

    def spread(self, values_N: Tensor) -> Tensor:
        """Values on the response axis [R], 0 where no token is predicted; carries gradients."""
        return values_N.new_zeros(self.num_places).index_put((self.places_N,), values_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherTokens:
    """Tokens of this micro-batch's trajectories that other micro-batches hold, all [M]: sequence means need them.

    They carry no gradient here and are in no sum; each is in the sums of its own micro-batch.
    """

    logprobs_M: Tensor
    weights_M: Tensor
    old_logprobs_M: Tensor
    advantages_M: Tensor
    trajectory_M: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Per-token values, all [N]. A token of weight 0 is masked: it changes neither loss, gradient nor metrics."""

    logprobs_N: Tensor
    """Under the current weights; carries the gradient."""
    weights_N: Tensor
    """Each token's share of the optimizer step's loss, over the global denominator; see `token_weights`."""
    trajectory_N: Tensor
    """Number of the trajectory that a token belongs to; sequence-level terms read it."""
    sample_N: Tensor
    """Number of the sample that a token belongs to."""
    entropy_N: Tensor | None = None
    """In nats, under the current weights; None when nobody asked for it."""
    old_logprobs_N: Tensor | None = None
    """Under the proximal policy: the weights before the first optimizer step of the rollout, or the engine's."""
    advantages_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    """Under the frozen reference model; None leaves the KL out."""
    rollout_logprobs_N: Tensor | None = None
    """Under the engine's weights when the token was sampled; a function by `--custom-tis-function-path` gets them."""
    correction_N: Tensor | None = None
    """Weights that correct for the policy that sampled; None is 1. See `corrections`."""
    logits_NV: Tensor | None = None
    """Whole logits over the temperature, in fp32, for a custom loss; otherwise they never exist at once."""
    targets_N: Tensor | None = None
    """Ids of the predicted tokens, for a custom loss."""
    layout: SampleLayout | None = None
    """For a function by `--custom-tis-function-path` or `--custom-pg-loss-reducer-function-path`."""
    num_units: float | None = None
    """Trajectories of the whole optimizer step with a token of weight, or those tokens; a user's sum is divided by it."""
    other: OtherTokens | None = None
    """Needed by sequence-level terms when a trajectory lies in several micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossMetrics:
    """A micro-batch's addends to the metrics of an optimizer step."""

    weighted: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Terms aggregated like the loss: scalars that add up to the step's value."""
    token_sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Sums over trainable tokens; divided by their number they are means."""
    shares: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    """Sums with a count of their own, such as values of a trajectory; sum over count is the mean."""
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values of which the largest is reported; may be empty."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Numbers that add up over the step."""
    num_tokens: int
    """Trainable tokens of the micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A micro-batch's addend to the step's loss."""

    loss: Tensor
    """Scalar; added over micro-batches and ranks it is the loss of the optimizer step."""
    metrics: Callable[[], LossMetrics]
    """Its addends to the metrics. Call it after `loss.backward()`: the CPU computes them while a GPU is at the backward pass."""
