"""One prompt, one response: the default generate function."""

from __future__ import annotations

import math
import uuid
from typing import Any

from miles.core.samples import Sample
from miles.errors import EngineError
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.inference_rollout.state import GenerateState
from miles.utils.chat_template_utils import encode_prompt
from miles.utils.http_utils import post

MAX_EMPTY_ABORTS = 1000
"""Requests of one sample that may be aborted one after another without a token; an update aborts each once or twice."""

STATUS = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Generate until the response ends.

    An engine that updates its weights aborts requests. Such a request goes on from the tokens it has, on the new
    weights: `sample.version_spans` says which version sampled which token. Only ids that the engine returned enter
    `sample.tokens`; nothing is tokenised again.
    """
    state, sample = input.state, input.sample
    if not sample.tokens:
        sample.tokens = prompt_ids(state, sample)
    prompt_len = len(sample.tokens) - sample.response_length
    budget = response_budget(input.sampling_params["max_new_tokens"], prompt_len, state.max_context_len)
    requests = empty = 0
    while True:
        left = budget - sample.response_length
        if left <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        params = {**input.sampling_params, "max_new_tokens": left}
        before = sample.response_length
        sample.status = await _request(state, sample, params)
        requests += 1
        if sample.status is not Sample.Status.ABORTED or state.aborted:
            break
        empty = empty + 1 if sample.response_length == before else 0
        if empty >= MAX_EMPTY_ABORTS:
            raise EngineError(
                f"the request for sample {sample.index} was aborted {empty} times without a token; "
                "look into the engines' logs for what aborts it"
            )
    if requests > 1:  # a character may have been split between two answers
        names = ("skip_special_tokens", "spaces_between_special_tokens")
        how = {name: input.sampling_params[name] for name in names}
        sample.response = str(state.tokenizer.decode(sample.tokens[prompt_len:], **how))
    return GenerateFnOutput(samples=sample)


def prompt_ids(state: GenerateState, sample: Sample) -> list[int]:
    """Token ids of a prompt that came without them, with the run's chat template settings."""
    return list(encode_prompt(state.tokenizer, sample.prompt, state.args.apply_chat_template_kwargs))


def response_budget(max_new_tokens: int, prompt_len: int, max_context_len: int | None) -> int:
    """Tokens that a response may have after a prompt of `prompt_len`; 0 or less when the context is full."""
    return max_new_tokens if max_context_len is None else min(max_new_tokens, max_context_len - prompt_len)


async def _request(state: GenerateState, sample: Sample, params: dict[str, Any]) -> Sample.Status:
    """One `/generate` call; appends what it returned to `sample`."""
    rid = f"{sample.group_index}-{sample.index}-{uuid.uuid4().hex[:12]}"
    payload = {"rid": rid, "input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    reply = await post(state.url("/generate"), payload)
    return append_reply(sample, reply, rid, params["max_new_tokens"])


def append_reply(sample: Sample, reply: Any, rid: str, max_new_tokens: int) -> Sample.Status:
    """Append the tokens of a `/generate` reply to `sample` and return how the generation ended.

    Raises EngineError naming the request when the reply does not hold exactly one finite log-prob per token, has more
    tokens than were asked for, or ended in a way that is not known.
    """
    name = f"request {rid} (sample {sample.index})"
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"{name}: the reply has no meta_info but is {str(reply)[:200]!r}")
    reason: dict[str, Any] = meta.get("finish_reason") or {}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    status = STATUS.get(reason.get("type", ""))
    if status is None:
        raise EngineError(f"{name}: finish_reason is {reason!r}; known types are {', '.join(STATUS)}")
    if status is Sample.Status.ABORTED and reason.get("status_code"):
        raise EngineError(f"{name}: refused by the engine: {reason.get('message') or reason}")
    entries: Any = meta.get("output_token_logprobs") or []  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    count: Any = meta.get("completion_tokens")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if count is None or len(entries) != count:
        raise EngineError(
            f"{name}: {count} completion_tokens but {len(entries)} entries of output_token_logprobs; log-probs were "
            "requested, and every token needs one"
        )
    if count > max_new_tokens:
        raise EngineError(f"{name}: {count} tokens were returned but at most {max_new_tokens} were asked for")
    token_ids = [int(entry[1]) for entry in entries]
    log_probs: list[float] = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
    if bad := [r for r, x in enumerate(log_probs) if not math.isfinite(x)]:
        raise EngineError(f"{name}: the log-prob of output token {bad[0]} is {entries[bad[0]][0]}; it must be finite")
    output_ids: Any = reply.get("output_ids")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if output_ids is not None and output_ids != token_ids:
        raise EngineError(f"{name}: output_ids and output_token_logprobs name different tokens")
    if token_ids:
        if "weight_version" not in meta:
            raise EngineError(f"{name}: the reply does not say which weight_version sampled it")
        sample.append_response(token_ids, log_probs, reply.get("text") or "", str(meta["weight_version"]))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    sample.cached_tokens += int(meta.get("cached_tokens") or 0)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return status
