"""Log-probabilities, entropies and top-k of tokens from hidden states, without ever holding all logits."""

# N predicted tokens, C of them in a chunk, D hidden size, V vocabulary (a rank's part of it when it is sharded), K entries

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from miles.backends.training_utils.fused_head import has_triton, linear_log_prob_entropy

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits that exist at a time, by device: 16 MiB in fp32, which stay in a CPU's cache, and 256 MiB on a GPU."""
WEIGHT_ROWS = 1 << 14
"""Rows of the head's gradient that are added at a time when it is summed in fp32 from 16 bits."""


class Vocabulary(Protocol):
    """Which ids the columns of the logits are, and how ranks that share the vocabulary add up."""

    @property
    def start(self) -> int:
        """Id of the first column."""
        ...

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        ...

    def max_(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        ...

    def join(self, values_CK: Tensor) -> Tensor:
        """What all ranks hold, side by side along the last axis, in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class WholeVocabulary:
    """Every id is a column: nothing to add up."""

    start: int = 0

    def sum_(self, values: Tensor) -> Tensor:
        return values

    def max_(self, values: Tensor) -> Tensor:
        return values

    def join(self, values_CK: Tensor) -> Tensor:
        return values_CK


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `rows` of the N predicted tokens with their natural-log probabilities, in fp32 (fp64 of an fp64 model)."""

    rows: slice
    log_p_CV: Tensor
    vocabulary: Vocabulary

    def at(self, ids_CK: Tensor) -> Tensor:
        """Log-probabilities of the ids of each row, [C, K]."""
        columns_CK, held_CK = self.columns(ids_CK)
        values_CK = self.log_p_CV.gather(1, columns_CK)
        return self.vocabulary.sum_(values_CK.masked_fill_(~held_CK, 0.0))

    def columns(self, ids_CK: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the ids, and which of them this rank holds; of others the column is 0."""
        columns_CK = ids_CK - self.vocabulary.start
        held_CK = (columns_CK >= 0) & (columns_CK < self.log_p_CV.shape[1])
        return columns_CK.masked_fill(~held_CK, 0), held_CK


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGradient:
    """A gradient with respect to logits z over softmax p: p x (`p_C` + `plogp_C` x log p) + `values_CK` at `ids_CK`."""

    p_C: Tensor
    plogp_C: Tensor | None = None
    ids_CK: Tensor | None = None
    values_CK: Tensor | None = None


class Head(Protocol):
    """What is made of each chunk of log-probabilities."""

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """Tensors [C, ...]; of integers, they carry no gradient."""
        ...

    def backward(self, chunk: Chunk, grads: tuple[Tensor | None, ...]) -> LogitGradient | None:
        """Gradient of the logits from gradients of the results; None when none of them has one."""
        ...


@dataclass(frozen=True, slots=True)
class TargetLogProb:
    """log p of one id per token; the gradient is onehot - p."""

    targets_N: Tensor

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        return (chunk.at(self.targets_N[chunk.rows, None]).squeeze(1),)

    def backward(self, chunk: Chunk, grads: tuple[Tensor | None, ...]) -> LogitGradient | None:
        (grad_C,) = grads
        if grad_C is None:
            return None
        return LogitGradient(p_C=-grad_C, ids_CK=self.targets_N[chunk.rows, None], values_CK=grad_C[:, None])


@dataclass(frozen=True, slots=True)
class Entropy:
    """H = -sum p log p in nats; the gradient is -p (log p + H). Costs nothing in the backward pass when H is detached."""

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        return (self._of(chunk),)

    def backward(self, chunk: Chunk, grads: tuple[Tensor | None, ...]) -> LogitGradient | None:
        (grad_C,) = grads
        return None if grad_C is None else LogitGradient(p_C=-grad_C * self._of(chunk), plogp_C=-grad_C)

    @staticmethod
    def _of(chunk: Chunk) -> Tensor:
        return chunk.vocabulary.sum_(chunk.log_p_CV.exp().mul_(chunk.log_p_CV).sum(dim=1)).neg_()


@dataclass(frozen=True, slots=True)
class TopK:
    """The `k` largest log-probabilities of each token, [N, k], and their ids; needs a vocabulary of at least k ids."""

    k: int

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        log_p_CV = chunk.log_p_CV
        held = min(self.k, log_p_CV.shape[1])
        best, ids = torch.topk(log_p_CV, held, dim=1)
        missing = (0, self.k - held)
        best = chunk.vocabulary.join(torch.nn.functional.pad(best, missing, value=float("-inf")))
        ids = chunk.vocabulary.join(torch.nn.functional.pad(ids + chunk.vocabulary.start, missing))
        best, order = torch.topk(best, self.k, dim=1)
        return best, ids.gather(1, order)

    def backward(self, chunk: Chunk, grads: tuple[Tensor | None, ...]) -> LogitGradient | None:
        grad_CK = grads[0]
        if grad_CK is None:
            return None
        _, ids_CK = self.forward(chunk)
        return LogitGradient(p_C=-grad_CK.sum(dim=1), ids_CK=ids_CK, values_CK=grad_CK)


WHOLE = WholeVocabulary()


def linear_log_softmax(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    heads: tuple[Head, ...],
    temperature: float,
    *,
    chunk_elements: int | None = None,
    vocabulary: Vocabulary = WHOLE,
    kept_bytes: int = 0,
) -> tuple[Tensor, ...]:
    """What `heads` make of log softmax(hidden @ weight.T / temperature), one after another.

    The product is in the tensors' own type, the softmax in fp32 (fp64 of fp64), over chunks of `chunk_elements` logits,
    which the backward pass computes again: nothing of [N, V] is kept. Beyond hidden states, weight and their gradients that
    is at most 10 bytes per logit of a chunk, and in the backward pass of 16 bits the fp32 sum of the weight's gradient.
    Of a sharded `vocabulary`, `weight_VD` is this rank's rows; hidden states, results and their gradients are those of
    every rank.

    On a GPU a target's log-prob, with or without the entropy, over the whole vocabulary goes through kernels of its own
    (see `fused_head`); then up to `kept_bytes` of logits are kept for the backward pass in place of computed again.
    """
    if chunk_elements is None and _can_fuse(hidden_ND, weight_VD, heads, vocabulary):
        targets_N = cast(TargetLogProb, heads[0]).targets_N
        return linear_log_prob_entropy(hidden_ND, weight_VD, targets_N, temperature, kept_bytes=kept_bytes)[
            : len(heads)
        ]
    if chunk_elements is None:
        chunk_elements = CHUNK_ELEMENTS.get(hidden_ND.device.type, CHUNK_ELEMENTS["cpu"])
    rows = max(1, chunk_elements // max(1, weight_VD.shape[0]))
    job = _Job(heads, float(temperature), rows, vocabulary)
    return cast("tuple[Tensor, ...]", _LinearLogSoftmax.apply(hidden_ND, weight_VD, job))


def _can_fuse(hidden_ND: Tensor, weight_VD: Tensor, heads: tuple[Head, ...], vocabulary: Vocabulary) -> bool:
    kinds = tuple(map(type, heads))
    fitting = kinds in ((TargetLogProb,), (TargetLogProb, Entropy)) and isinstance(vocabulary, WholeVocabulary)
    same = hidden_ND.dtype == weight_VD.dtype != torch.float64
    return fitting and same and hidden_ND.is_cuda and has_triton()


def token_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    *,
    chunk_elements: int | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target, and entropy in nats, under softmax(hidden @ weight.T / temperature).

    `hidden_ND[n]` is the state that predicts `targets_N[n]`: the one a position earlier. Returns two tensors [N]; both
    carry gradients to `hidden_ND` and `weight_VD`. See `linear_log_softmax`.
    """
    logprobs_N, entropy_N = linear_log_softmax(
        hidden_ND,
        weight_VD,
        (TargetLogProb(targets_N), Entropy()),
        temperature,
        chunk_elements=chunk_elements,
        vocabulary=vocabulary,
    )
    return logprobs_N, entropy_N


@dataclass(frozen=True, slots=True)
class _Job:
    heads: tuple[Head, ...]
    temperature: float
    rows: int
    vocabulary: Vocabulary

    def chunks(self, hidden_ND: Tensor, weight_VD: Tensor) -> Iterator[Chunk]:
        """All chunks in order; at least one, which may be of no row."""
        for start in range(0, max(1, len(hidden_ND)), self.rows):
            rows = slice(start, start + self.rows)
            yield Chunk(
                rows, _log_softmax(hidden_ND[rows], weight_VD, self.temperature, self.vocabulary), self.vocabulary
            )


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, vocabulary: Vocabulary) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.T
    if logits_CV.dtype != torch.float64:
        logits_CV = logits_CV.float()
    if temperature != 1.0:
        logits_CV.div_(temperature)
    if isinstance(vocabulary, WholeVocabulary):
        return torch.log_softmax(logits_CV, dim=-1)
    logits_CV.sub_(vocabulary.max_(logits_CV.amax(dim=1, keepdim=True)))
    return logits_CV.sub_(vocabulary.sum_(logits_CV.exp().sum(dim=1, keepdim=True)).log_())


class _LinearLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, job: _Job) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_ND, weight_VD)
        ctx.job = job
        ctx.counts = [0] * len(job.heads)
        found: list[Tensor] = []
        for chunk in job.chunks(hidden_ND, weight_VD):
            parts = [head.forward(chunk) for head in job.heads]
            ctx.counts = [len(part) for part in parts]
            for number, values in enumerate(value for part in parts for value in part):
                if chunk.rows.start == 0:
                    found.append(values.new_empty((len(hidden_ND), *values.shape[1:])))
                found[number][chunk.rows] = values
        ctx.mark_non_differentiable(*(values for values in found if not values.is_floating_point()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD = ctx.saved_tensors
        job: _Job = ctx.job
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        grad_hidden_ND = torch.zeros_like(hidden_ND) if wants_hidden else None
        accumulate = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        grad_weight_VD = (
            torch.zeros(weight_VD.shape, dtype=accumulate, device=weight_VD.device) if wants_weight else None
        )
        for chunk in job.chunks(hidden_ND, weight_VD):
            grad_CV = _logit_gradient(chunk, job, ctx.counts, grads)
            if grad_CV is None:
                break
            rows = chunk.rows
            # The chunk's own log-probs became the gradient; only a copy in the model's type is needed from here.
            del chunk
            grad_CV = grad_CV.div_(job.temperature).to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV, hidden_ND[rows])
        if grad_hidden_ND is not None:
            job.vocabulary.sum_(grad_hidden_ND)
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None


def _logit_gradient(chunk: Chunk, job: _Job, counts: list[int], grads: tuple[Tensor | None, ...]) -> Tensor | None:
    """The gradient of a chunk's scaled logits, in the memory of its log-probabilities; None when nothing has a gradient."""
    terms: list[LogitGradient] = []
    first = 0
    for head, count in zip(job.heads, counts, strict=True):
        own = tuple(None if grad is None else grad[chunk.rows] for grad in grads[first : first + count])
        first += count
        term = head.backward(chunk, own)
        if term is not None:
            terms.append(term)
    if not terms:
        return None
    factor_C1 = torch.stack([term.p_C for term in terms]).sum(dim=0)[:, None]
    with_log = [term.plogp_C for term in terms if term.plogp_C is not None]
    if with_log:
        factor_CV = (chunk.log_p_CV * torch.stack(with_log).sum(dim=0)[:, None]).add_(factor_C1)
        grad_CV = chunk.log_p_CV.exp_().mul_(factor_CV)
    else:
        grad_CV = chunk.log_p_CV.exp_().mul_(factor_C1)
    for term in terms:
        if term.ids_CK is not None and term.values_CK is not None:
            columns_CK, held_CK = chunk.columns(term.ids_CK)
            grad_CV.scatter_add_(1, columns_CK, term.values_CK.to(grad_CV.dtype).masked_fill(~held_CK, 0.0))
    return grad_CV


def _add_product(grad_weight_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """Add grad.T @ hidden; of 16 bits a few rows at a time, so that no second [V, D] comes to be."""
    if grad_weight_VD.dtype == grad_CV.dtype:
        grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
        return
    for start in range(0, len(grad_weight_VD), WEIGHT_ROWS):
        rows = slice(start, start + WEIGHT_ROWS)
        grad_weight_VD[rows] += grad_CV[:, rows].T @ hidden_CD
