"""The policy loss: policy-gradient terms, their corrections, entropy bonus and KL, as one weighted sum."""

# N predicted tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.kl import KlKind, kl_estimate, unbiased_kl_estimate
from miles.backends.training_utils.loss_hub.objectives import (
    OBJECTIVES,
    OF_SEQUENCES,
    Bounds,
    PolicyTokens,
    off_policy_sequences,
)
from miles.backends.training_utils.loss_hub.pg_reducer import PgReducer
from miles.backends.training_utils.loss_hub.records import LossInputs, LossMetrics, LossOutput, OtherTokens
from miles.backends.training_utils.loss_hub.sequences import LOG_RATIO_BOUND, effective_sizes, sequences

CorrectTerms = Callable[[Tensor, LossInputs], tuple[Tensor, dict[str, Tensor]]]
"""From terms [N] and the micro-batch to corrected terms [N] and per-token metrics [N]; see `tis_hook`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """loss = sum of weights x (terms - entropy_coef x entropy + kl_coef x KL). Reads masked tokens nowhere.

    In this order: log-ratio, bounded at +-20; the objective's terms; off-policy sequences out (`opsm_delta`); correction
    weights, and the user's correction; the weighted sum, or the user's; entropy and KL.

    A token whose current log-prob is -inf (the model cannot produce it any more) has neither term nor KL; it is counted
    as `dropped_tokens` and leaves denominators as they are. NaN is not hidden: the step will be skipped.
    """

    objective: str = "ppo"
    bounds: Bounds = field(default_factory=Bounds)
    opsm_delta: float | None = None
    """Leave out trajectories of negative advantage that drifted by more; None keeps them."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KlKind = "k1"
    kl_unbiased: bool = False
    correct_terms: CorrectTerms | None = field(default=None, compare=False)
    reduce_terms: PgReducer | None = field(default=None, compare=False)
    """Makes the sum of the policy-gradient terms in place of the weights; entropy and KL keep them."""
    old_is_current: bool = False
    """Old log-probs are the current ones without gradient: no weight has moved since the samples were scored."""

    @property
    def needs_trajectories(self) -> bool:
        """Whether a term depends on the whole trajectory, so that `LossInputs.other` matters to the loss."""
        return not self.old_is_current and (self.objective in OF_SEQUENCES or self.opsm_delta is not None)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of a micro-batch; needs `old_logprobs_N` and `advantages_N`, and `ref_logprobs_N` for the KL."""
        old_logprobs_N = inputs.logprobs_N.detach() if self.old_is_current else inputs.old_logprobs_N
        if old_logprobs_N is None or inputs.advantages_N is None:
            raise ValueError("the policy loss needs old log-probs and advantages")
        weights_N, trainable_N = inputs.weights_N, inputs.weights_N != 0
        kept_N = trainable_N & ~torch.isneginf(inputs.logprobs_N.detach())

        def read(values_N: Tensor) -> Tensor:
            return torch.where(kept_N, values_N, torch.zeros_like(values_N))

        logprobs_N, old_N, advantages_N = map(read, (inputs.logprobs_N, old_logprobs_N, inputs.advantages_N))
        log_ratio_N = (logprobs_N - old_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        tokens = PolicyTokens(
            logprobs_N=logprobs_N,
            old_logprobs_N=old_N,
            log_ratio_N=log_ratio_N,
            advantages_N=advantages_N,
            sequences=lambda: sequences(
                log_ratio_N, advantages_N, read(weights_N), inputs.trajectory_N, _others(inputs.other)
            ),
        )
        terms = OBJECTIVES[self.objective](tokens, self.bounds)
        loss_N = terms.loss_N
        token_values: dict[str, Tensor] = {}
        if self.opsm_delta is not None:
            out_N = off_policy_sequences(tokens, self.opsm_delta)
            loss_N = torch.where(out_N != 0, 0.0, loss_N)
            token_values["opsm_clipfrac"] = out_N
        if inputs.correction_N is not None:
            loss_N = loss_N * read(inputs.correction_N)
        if self.correct_terms is not None:
            loss_N, found = self.correct_terms(loss_N, inputs)
            token_values |= found
        loss_N = read(loss_N)
        pg = (weights_N * loss_N).sum() if self.reduce_terms is None else self.reduce_terms(loss_N, inputs)
        loss, weighted = pg, {"pg_loss": pg.detach()}
        if inputs.entropy_N is not None:
            entropy = (weights_N * torch.where(trainable_N, inputs.entropy_N, 0)).sum()
            weighted["entropy_loss"] = entropy.detach()
            if self.entropy_coef:
                loss = loss - self.entropy_coef * entropy
        if inputs.ref_logprobs_N is not None:
            kl = (weights_N * read(self._kl(logprobs_N, read(inputs.ref_logprobs_N), old_N))).sum()
            weighted["kl_loss"] = kl.detach()
            if self.kl_coef:
                loss = loss + self.kl_coef * kl

        def metrics() -> LossMetrics:
            ratio_N = log_ratio_N.detach().exp()
            values = {"pg_clipfrac": terms.clipped_N, "ppo_kl": -log_ratio_N.detach(), "ois": ratio_N} | token_values
            return LossMetrics(
                weighted=weighted,
                token_sums={name: read(values_N).sum().detach() for name, values_N in values.items()},
                shares={"ess_ratio": effective_sizes(ratio_N, kept_N, inputs.sample_N)},
                maxima={"ratio_max": terms.ratio_N[kept_N]},
                counts={"dropped_tokens": int((trainable_N & ~kept_N).sum())},
                num_tokens=int(kept_N.sum()),
            )

        return LossOutput(loss, metrics)

    def _kl(self, logprobs_N: Tensor, ref_logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
        if self.kl_unbiased:
            return unbiased_kl_estimate(logprobs_N, ref_logprobs_N, old_logprobs_N, self.kl_kind)
        return kl_estimate(logprobs_N, ref_logprobs_N, self.kl_kind)


def _others(other: OtherTokens | None) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Log-ratio, advantage, weight and trajectory of tokens in other micro-batches, with the same rules as for those here."""
    if other is None:
        return None
    kept_M = (other.weights_M != 0) & ~torch.isneginf(other.logprobs_M)
    log_ratio_M = torch.where(kept_M, other.logprobs_M - other.old_logprobs_M, 0)
    return (
        log_ratio_M.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
        torch.where(kept_M, other.advantages_M, 0),
        torch.where(kept_M, other.weights_M, 0),
        other.trajectory_M,
    )
