"""Importance weights and rejections for tokens that another policy sampled than the trainer's: stale, or the engine's.

They depend on log-probs of before the optimizer step only, so they are computed once for the whole batch: no split of it
can change them, and they carry no gradient.
"""

# R response tokens of all samples end to end, K trainable ones, S trajectories

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles.backends.training_utils.loss_hub.sequences import LOG_RATIO_BOUND
from miles.config.objectives import CorrectionPreset
from miles.config.schema import CorrectionConfig

Level = Literal["token", "sequence", "geometric"]
"""`token`: each token's own ratio. `sequence`: the product over the trajectory. `geometric`: its geometric mean."""
Mode = Literal["truncate", "clip", "mask"]
"""`truncate`: at most `upper`, and at least `lower`, which is 0 unless given. `clip`: into [lower, upper], which is
1 / upper unless given. `mask`: tokens outside [lower, upper] are rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """Weights from ratios old / rollout at `level`."""

    level: Level = "token"
    mode: Mode = "truncate"
    lower: float = 0.0
    upper: float | None = 2.0
    """None does not bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Tokens whose ratio at `level` is outside [lower, upper] leave the loss mask."""

    level: Level
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What to correct with; each part alone or with the others."""

    weighting: Weighting | None = None
    rejection: Rejection | None = None
    veto: float | None = None
    """A trajectory with a token whose ratio is below this leaves the loss mask."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the batch's tokens that are left."""

    @property
    def is_active(self) -> bool:
        """Whether it changes the loss."""
        return self.weighting is not None or self.rejection is not None or self.veto is not None


PRESETS: dict[CorrectionPreset, tuple[Weighting | None, Rejection | None]] = {
    "none": (None, None),
    "tis": (Weighting(level="token", mode="truncate", lower=0.0, upper=2.0), None),
    "mis": (Weighting(level="sequence", mode="mask", lower=0.5, upper=2.0), None),
    "icepop": (Weighting(level="token", mode="mask", lower=0.5, upper=5.0), None),
    "rejection": (None, Rejection(level="sequence", lower=0.5, upper=2.0)),
    "decoupled_ppo": (Weighting(level="token", mode="truncate", lower=0.0, upper=None), None),
}
"""Weighting and rejection of every `--correction-preset`, where the settings do not say otherwise."""


def build_correction(config: CorrectionConfig) -> Correction:
    """What the settings of the section `correction` mean; a user's function replaces the weighting."""
    preset: CorrectionPreset = "tis" if config.use_tis else config.preset
    weighting, rejection = PRESETS[preset]
    if config.custom_tis_function_path is not None:
        weighting = None
    if weighting is not None:
        mode = config.mode or weighting.mode
        upper = weighting.upper if config.upper is None else config.upper
        lower = weighting.lower if config.lower is None else config.lower
        if config.lower is None and (config.upper is not None or config.mode is not None) and preset != "icepop":
            lower = 0.0 if mode == "truncate" or upper is None else 1 / upper
        weighting = Weighting(level=config.level or weighting.level, mode=mode, lower=lower, upper=upper)
    if config.rejection_level is not None or rejection is not None:
        upper = config.rejection_upper
        lower = 1 / upper if config.rejection_lower is None else config.rejection_lower
        rejection = Rejection(level=config.rejection_level or "sequence", lower=lower, upper=upper)
    return Correction(
        weighting=weighting,
        rejection=rejection,
        veto=config.veto_threshold,
        batch_normalize=config.batch_normalize,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """What came of a correction."""

    weights_R: Tensor
    """Factors of the policy-gradient terms; 0 where a token is masked or rejected."""
    keep_R: Tensor
    """Bool: the trainable tokens that stay in the loss mask."""
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    old_logprobs_R: Tensor,
    rollout_logprobs_R: Tensor,
    trainable_R: Tensor,
    trajectory_R: Tensor,
    correction: Correction,
) -> Corrected:
    """Weights, kept tokens and metrics of a batch, from ratio = exp(old - rollout) (log-ratios bounded at +-20).

    `old_logprobs_R` is the proximal policy that the trainer's ratios start from, `rollout_logprobs_R` the policy that
    sampled; `trainable_R` (bool) says which tokens count: the others are read nowhere.

    Truncated token weights are TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"); token weights that mask are IcePop (Ling team 2025, Ring-1T); sequence and geometric levels, rejection
    and veto are MIS (Liu et al. 2025, "When speed kills stability"); unbounded token weights over a proximal policy are
    the decoupled objective (Hilton et al. 2021; Fu et al. 2025, AReaL).
    """
    old_K, rollout_K = old_logprobs_R[trainable_R], rollout_logprobs_R[trainable_R]
    log_ratio_K = (old_K - rollout_K).double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratios = _Ratios(log_ratio_K, trajectory_R[trainable_R])
    keep_K = torch.ones_like(ratios.log_K, dtype=torch.bool)
    weights_K = torch.ones_like(ratios.log_K)
    metrics: dict[str, float] = {}
    if (w := correction.weighting) is not None:
        raw_K = ratios.at(w.level)
        upper = float("inf") if w.upper is None else w.upper
        outside_K = (raw_K < w.lower) | (raw_K > upper)
        if w.mode == "mask":
            weights_K, keep_K = raw_K, ~outside_K
        else:
            weights_K = raw_K.clamp(w.lower, upper)
        metrics |= _means(tis=raw_K, tis_clipfrac=outside_K.double(), tis_abs=(raw_K - 1).abs())
    if (r := correction.rejection) is not None:
        raw_K = ratios.at(r.level)
        keep_K = keep_K & (raw_K >= r.lower) & (raw_K <= r.upper)
    if correction.veto is not None:
        vetoed_K = ratios.any_in_trajectory(ratios.log_K.exp() < correction.veto)
        keep_K = keep_K & ~vetoed_K
        metrics |= _means(mis_vetoed=vetoed_K.double())
    weights_K = torch.where(keep_K, weights_K, 0.0)
    if correction.batch_normalize and bool(keep_K.any()):
        weights_K = weights_K / (weights_K.sum() / keep_K.sum()).clamp_min(torch.finfo(weights_K.dtype).tiny)
    if correction.is_active:
        metrics |= _means(mis_rejected=(~keep_K).double())
        metrics |= _means(mis_trajectories_rejected=_all_in_trajectory(~keep_K, ratios))
    metrics |= mismatch_metrics(old_K, rollout_K, ratios)
    weights_R = torch.zeros_like(old_logprobs_R).masked_scatter_(trainable_R, weights_K.to(old_logprobs_R.dtype))
    keep_R = torch.zeros_like(trainable_R).masked_scatter_(trainable_R, keep_K)
    return Corrected(weights_R, keep_R, metrics)


class _Ratios:
    """old / rollout over the trainable tokens of a batch."""

    def __init__(self, log_K: Tensor, trajectory_K: Tensor) -> None:
        self.log_K = log_K
        _, self.index_K, self.tokens_S = torch.unique(trajectory_K, return_inverse=True, return_counts=True)

    def at(self, level: Level) -> Tensor:
        """The ratio at `level` of each token, [K]; log-ratios are bounded at +-20 again."""
        if level == "token":
            return self.log_K.exp()
        log_S = self.sum_S(self.log_K)
        if level == "geometric":
            log_S = log_S / self.tokens_S
        return log_S.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[self.index_K]

    def sum_S(self, values_K: Tensor) -> Tensor:
        return torch.zeros(len(self.tokens_S), dtype=torch.float64).index_add(0, self.index_K, values_K.double())

    def any_in_trajectory(self, flags_K: Tensor) -> Tensor:
        return (self.sum_S(flags_K) > 0)[self.index_K]


def _all_in_trajectory(flags_K: Tensor, ratios: _Ratios) -> Tensor:
    return (ratios.sum_S(flags_K) == ratios.tokens_S).double()


def mismatch_metrics(old_K: Tensor, rollout_K: Tensor, ratios: _Ratios) -> dict[str, float]:
    """How far the policy that sampled is from the proximal one, over trainable tokens; none when there are none.

    `train_rollout_kl` and `mis_k3` estimate KL(rollout || old), with rho = old / rollout, as rho - 1 - log rho, and
    `mis_kl` as -log rho. `mis_ppl_*` are exp(-mean log-prob) of trajectories, averaged. `mis_chi2_*` estimate the
    chi-square divergence as mean rho^2 - 1, of tokens and of whole trajectories.
    """
    if not len(old_K):
        return {}
    log_K = ratios.log_K
    k3_K = torch.expm1(log_K) - log_K
    ppl_old_S, ppl_rollout_S = (-ratios.sum_S(x_K) / ratios.tokens_S for x_K in (old_K, rollout_K))
    log_S = ratios.sum_S(log_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_K = log_K.exp()
    return _means(
        train_rollout_logprob_abs_diff=(old_K - rollout_K).abs().double(),
        train_rollout_kl=k3_K.clamp(-10, 10),
        mis_kl=-log_K,
        mis_k3=k3_K,
        mis_ppl_train=ppl_old_S.exp(),
        mis_ppl_rollout=ppl_rollout_S.exp(),
        mis_log_ppl_abs_diff=(ppl_old_S - ppl_rollout_S).abs(),
        mis_chi2_token=ratio_K.square() - 1,
        mis_chi2_seq=(2 * log_S).exp() - 1,
        mis_ratio_mean=ratio_K,
    ) | {
        "mis_ratio_min": float(ratio_K.min()),
        "mis_ratio_max": float(ratio_K.max()),
        "mis_log_ppl_abs_diff_max": float((ppl_old_S - ppl_rollout_S).abs().max()),
    }


def _means(**values: Tensor) -> dict[str, float]:
    return {name: float(v.mean()) for name, v in values.items() if v.numel()}
