"""`--recompute-logprobs-via-prefill`: engines score finished responses once more, each in one pass over the whole sequence."""

# T tokens of a sequence, R response tokens

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.backends.training_utils.parity import compare
from miles.backends.weight_sync.probes import prompt_scores
from miles.core.samples import Sample
from miles.errors import EngineError
from miles.rollout.base_types import RolloutGroup
from miles.rollout.groups import flatten
from miles.utils.async_utils import gather_or_cancel
from miles.utils.http_utils import REQUEST_ID, HttpError, post
from miles.utils.waits import OPEN

if TYPE_CHECKING:
    from miles.rollout.inference_rollout.state import GenerateState

MAX_ABORTS = 1000
"""Requests of one sequence that may be aborted one after another; a weight update aborts each once or twice."""
KEPT_FREE = 8
"""Tokens that SGLang keeps free of a prompt: it generates up to the last two places of the context, and takes no prompt
that reaches the last six."""
CACHE_KEY = "prefill"
"""Begins the cache key of scoring requests. Generation has other keys, so no KV that was made by decoding is read."""
BAD_REQUEST = 400


@dataclass(frozen=True, slots=True)
class PrefillScores:
    """What an engine says of a sequence that it was given as a prompt."""

    log_probs: list[float]
    """Of each token after the first one asked for, in nats."""
    weight_version: str


@dataclass(slots=True)
class _Found:
    """What the recomputation found, over all samples."""

    decoded: list[float] = field(default_factory=list[float])
    prefilled: list[float] = field(default_factory=list[float])
    replaced: int = 0
    kept: int = 0


async def recompute_log_probs(state: GenerateState, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Replace `rollout_log_probs` of the tokens that a model made by what the engines' prefill says of them.

    Masked tokens, such as those of an environment, keep what they have, or get 0 where a sample has no log-probs. So does
    a token of an older weight version than the one that scores: its log-prob is that of the policy that sampled it, and
    no engine holds that one any more. Samples that are not trained on are left alone. Returns metrics: how far the two
    are apart in nats, tokens replaced and kept, and the seconds it took.

    Raises EngineError when an engine scores other tokens than it was sent, and for a sample that has no log-probs and
    whose tokens cannot all be scored.
    """
    started, found = time.monotonic(), _Found()
    due = [s for s in flatten(list(groups)) if s.effective_response_length and not s.remove_sample]
    await gather_or_cancel([_recompute(state, sample, found) for sample in due])
    metrics = {
        "rollout/prefill/tokens": float(found.replaced),
        "rollout/prefill/kept_tokens": float(found.kept),
        "rollout/prefill/seconds": time.monotonic() - started,
    }
    if found.decoded:
        report = compare(found.prefilled, found.decoded)
        metrics |= {f"rollout/prefill/abs_diff_{name}": getattr(report, name) for name in ("mean", "p99", "max")}
    return metrics


async def score_by_prefill(
    url: str,
    tokens: Sequence[int],
    start: int,
    *,
    temperature: float,
    cache_key: str,
    name: str,
    headers: dict[str, str] | None = None,
) -> PrefillScores:
    """Log-probs of `tokens[start + 1:]` from one pass over `tokens` [T] at the engine or router at `url`.

    The torch engine divides logits by `temperature`; SGLang scores prompts at temperature 1. Nothing of the response is
    taken from a cache: both engines compute anew what lies behind `start`. An aborted request is sent again. Raises
    EngineError, which names the sequence by `name`, when the answer is of other tokens or has none of a token (JSON has no infinity).
    """
    payload = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": temperature, "top_p": 1.0, "top_k": -1},
        "return_logprob": True,
        "logprob_start_len": start,
        "extra_key": cache_key,
    }
    for _ in range(MAX_ABORTS):
        rid = f"score-{uuid.uuid4().hex[:12]}"
        with OPEN.on("router", "score by prefill", request=rid):
            sent = {REQUEST_ID: rid, **(headers or {})}
            reply = await post(f"{url}/generate", {**payload, "rid": rid}, headers=sent)
        meta: dict[str, Any] = (reply.get("meta_info") if isinstance(reply, dict) else None) or {}
        reason = meta.get("finish_reason") or {}
        if reason.get("type") != "abort":
            return _scores(meta, tokens, start, name)
        if reason.get("status_code"):
            raise EngineError(f"{name}: the engine refused to score it: {reason.get('message') or reason}")
    raise EngineError(
        f"{name}: scoring it was aborted {MAX_ABORTS} times; look into the engines' logs for what aborts it"
    )


def _scores(meta: dict[str, Any], tokens: Sequence[int], start: int, name: str) -> PrefillScores:
    entries = meta.get("input_token_logprobs")
    if not entries:
        raise EngineError(f"{name}: log-probs of its tokens were requested but the reply has no input_token_logprobs")
    if meta.get("weight_version") is None:
        raise EngineError(f"{name}: the reply does not say which weight_version scored it")
    try:
        return PrefillScores(prompt_scores(entries, tokens[start:]), str(meta["weight_version"]))
    except ValueError as error:
        raise EngineError(f"{name}, from token {start} on: {error}") from error


async def _recompute(state: GenerateState, sample: Sample, found: _Found) -> None:
    name = f"sample {sample.index} (group {sample.group_index})"
    scores = await _score(state, sample, name)
    before_R = sample.rollout_log_probs
    mask_R = sample.loss_mask or [1] * sample.response_length
    made = [r for r, trained in enumerate(mask_R) if trained]
    scored = [] if scores is None else [r for r in made if _version_at(sample, r) in (None, scores.weight_version)]
    if before_R is None and len(scored) < len(made):
        raise EngineError(
            f"{name}: it has no log-probs, and {len(made) - len(scored)} of its {len(made)} trained tokens cannot be scored: "
            "they are of an older weight version, or it fills the context; let the generate function set rollout_log_probs"
        )
    after_R = [0.0] * sample.response_length if before_R is None else list(before_R)
    found.kept += len(made) - len(scored)
    found.replaced += len(scored)
    if scores is None or not scored:
        return
    first = sample.response_length - len(scores.log_probs)
    for r in scored:
        after_R[r] = scores.log_probs[r - first]
    if before_R is not None:
        found.decoded += [before_R[r] for r in scored]
        found.prefilled += [after_R[r] for r in scored]
    sample.rollout_log_probs = after_R


async def _score(state: GenerateState, sample: Sample, name: str) -> PrefillScores | None:
    """Scores of the response; None for one so close to the context's end that SGLang does not take it as a prompt."""
    tokens, limit = sample.tokens, state.max_context_len
    start = len(tokens) - sample.response_length - 1
    if start < 0:
        raise EngineError(f"{name}: it has no prompt, so nothing predicts its first token; give it a token before")
    async with state.semaphore:
        try:
            return await score_by_prefill(
                state.url(""),
                tokens,
                start,
                temperature=state.sampling_params["temperature"],
                cache_key=f"{CACHE_KEY}-{state.weight_version}",
                name=name,
            )
        except HttpError as error:
            if error.status == BAD_REQUEST and limit is not None and len(tokens) > limit - KEPT_FREE:
                return None
            raise


def _version_at(sample: Sample, r: int) -> str | None:
    """Weight version that sampled response token `r`; None where the sample does not say."""
    return next((version for start, version in reversed(sample.version_spans) if start <= r), None)
