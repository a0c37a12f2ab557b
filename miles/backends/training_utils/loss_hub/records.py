"""What goes into a loss and what comes out, for one micro-batch."""

# N predicted tokens of the micro-batch

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token values, all [N]. A token of weight 0 is masked: it changes neither loss, gradient nor metrics."""

    logprobs_N: Tensor
    """Under the current weights; carries the gradient."""
    entropy_N: Tensor
    """In nats, under the current weights."""
    weights_N: Tensor
    """Each token's share of the optimizer step's loss, over the global denominator; see `token_weights`."""
    old_logprobs_N: Tensor | None = None
    """Under the weights before the first optimizer step of the rollout."""
    advantages_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    """Under the frozen reference model; None leaves the KL out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A micro-batch's addend to the step's loss, with its addends to the metrics."""

    loss: Tensor
    """Scalar; added over micro-batches and ranks it is the loss of the optimizer step."""
    weighted: dict[str, Tensor] = field(default_factory=dict)
    """Terms aggregated like the loss: scalars that add up to the step's value."""
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over trainable tokens; divided by their number they are means."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Values of which the largest is reported; may be empty."""
    num_tokens: int
    """Trainable tokens of the micro-batch."""
