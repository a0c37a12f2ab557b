"""Drawing the next token of every sequence of a batch at once.

Axes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_TOP_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws and ends. temperature 0 is greedy; top_k -1, top_p 1 and min_p 0 cut nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    sampling_seed: int | None = None

    @property
    def draws(self) -> bool:
        """Whether chance decides anything."""
        return self.temperature > 0 and self.max_new_tokens > 0


class BatchSampling:
    """The sampling parameters of a batch as tensors; build it anew when the batch changes."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        temperatures = [p.temperature for p in params]
        self.greedy = [t == 0 for t in temperatures]
        self.any_greedy, self.all_greedy = any(self.greedy), all(self.greedy)
        self.greedy_B = torch.tensor(self.greedy, device=device) if self.any_greedy else None
        plain = all(t in (0, 1) for t in temperatures)
        self.temperature_B1 = None if plain else torch.tensor([[t or 1.0] for t in temperatures], device=device)
        self.seeded = np.array([p.sampling_seed is not None for p in params])
        self.any_seeded = bool(self.seeded.any())
        self.seeds = np.array([(p.sampling_seed or 0) & 0xFFFFFFFFFFFFFFFF for p in params], dtype=np.uint64)
        self.cut_rows = [
            i for i, p in enumerate(params) if p.temperature and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0)
        ]
        cut = [params[i] for i in self.cut_rows]
        self.top_p_C1 = torch.tensor([[p.top_p] for p in cut], device=device)
        self.top_k_C1 = torch.tensor([[p.top_k if p.top_k > 0 else 2**31 - 1] for p in cut], device=device)
        self.min_p_C1 = torch.tensor([[p.min_p] for p in cut], device=device)


def hashed_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniforms in [0, 1) that depend on (seed, position) alone: SplitMix64's finaliser (Steele et al. 2014), twice."""
    with np.errstate(over="ignore"):
        x = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x ^ (positions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)))
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits_BV: torch.Tensor,
    batch: BatchSampling,
    positions: Sequence[int],
    rng: np.random.Generator,
    banned: Sequence[tuple[int, Sequence[int]]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    `positions` is each row's index of the drawn token in its sequence; `banned` names (row, token ids) that must not
    be drawn. Returns token ids [B] and their fp32 log-probabilities [B] under the whole softmax at the row's
    temperature (1 for greedy rows): cuts and bans do not change them. `logits_BV` is fp32 and is overwritten. A row
    whose logits are not finite gets a log-probability that is not finite.
    """
    scaled = logits_BV if batch.temperature_B1 is None else logits_BV.div_(batch.temperature_B1)
    peak_B1 = scaled.amax(1, keepdim=True)
    mass_BV = (scaled - peak_B1).exp_()
    total_B = mass_BV.sum(1)
    open_BV = scaled
    if banned:
        open_BV = scaled.clone()
        for row, ids in banned:
            open_BV[row, list(ids)] = float("-inf")
            mass_BV[row] = (open_BV[row] - open_BV[row].max()).exp_()
    if batch.all_greedy:
        tokens_B = open_BV.argmax(1)
    else:
        uniforms = rng.random(len(scaled), dtype=np.float32)
        if batch.any_seeded:
            hashed = hashed_uniforms(batch.seeds, np.asarray(positions))
            uniforms = np.where(batch.seeded, hashed, uniforms)
        uniforms_B1 = torch.from_numpy(uniforms).to(scaled.device)[:, None]
        if len(batch.cut_rows) == len(scaled):
            tokens_B = _draw_cut(mass_BV, batch, uniforms_B1)
        else:
            tokens_B = _draw(mass_BV, uniforms_B1)
            if batch.cut_rows:
                rows = batch.cut_rows
                tokens_B[rows] = _draw_cut(mass_BV[rows], batch, uniforms_B1[rows])
        if batch.greedy_B is not None:
            tokens_B = torch.where(batch.greedy_B, open_BV.argmax(1), tokens_B)
    logprobs_B = scaled.gather(1, tokens_B[:, None]).sub_(peak_B1).squeeze(1) - total_B.log()
    return tokens_B, logprobs_B


def _draw(mass_BV: torch.Tensor, uniforms_B1: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution of unnormalised masses: the first index whose sum exceeds u times the total."""
    sums_BV = mass_BV.cumsum(1)
    total_B1 = sums_BV[:, -1:].contiguous()
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    target_B1 = torch.minimum(uniforms_B1 * total_B1, below_B1)
    return torch.searchsorted(sums_BV, target_B1, right=True).squeeze(1).clamp_(max=mass_BV.shape[1] - 1)


def _draw_cut(mass_CV: torch.Tensor, batch: BatchSampling, uniforms_C1: torch.Tensor) -> torch.Tensor:
    """Draw after top-k, top-p and min-p, each judged on the uncut distribution (a token must pass all three)."""
    cuts = (batch.top_p_C1 * mass_CV.sum(1, keepdim=True), batch.top_k_C1, batch.min_p_C1)
    width = min(mass_CV.shape[1], _TOP_CANDIDATES)
    tokens_C, wider_C = _draw_top(mass_CV, cuts, uniforms_C1, width)
    if width < mass_CV.shape[1] and bool(wider_C.any()):
        # Only the rows that need it: which of equal masses comes first may depend on the width.
        rows = wider_C.nonzero().squeeze(1)
        some = (cuts[0][rows], cuts[1][rows], cuts[2][rows])
        tokens_C[rows], _ = _draw_top(mass_CV[rows], some, uniforms_C1[rows], mass_CV.shape[1])
    return tokens_C


def _draw_top(
    mass_CV: torch.Tensor,
    cuts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    uniforms_C1: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `width` largest masses after the cuts by mass above, rank and share of the largest, each [C, 1].

    Returns token ids [C], and [C] whether a row would keep more candidates than `width`.
    """
    mass_above_C1, top_k_C1, min_p_C1 = cuts
    mass_CW, ids_CW = mass_CV.topk(width, dim=1)
    sums_CW = mass_CW.cumsum(1)
    ranks_W = torch.arange(width, device=mass_CV.device)
    kept_CW = (sums_CW - mass_CW < mass_above_C1) & (ranks_W < top_k_C1) & (mass_CW >= min_p_C1 * mass_CW[:, :1])
    kept_CW[:, 0] = True
    picked_C = _draw(mass_CW * kept_CW, uniforms_C1)
    return ids_CW.gather(1, picked_C[:, None]).squeeze(1), kept_CW[:, -1]
