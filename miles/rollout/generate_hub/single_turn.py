"""One prompt, one response: the default generate function."""

from __future__ import annotations

import math
import uuid
from typing import Any, cast

from miles.core.samples import Sample
from miles.errors import EngineError
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.dataset.rows import tools_of
from miles.rollout.inference_rollout.state import GenerateState
from miles.utils.chat_template_utils import encode_prompt
from miles.utils.http_utils import MOST_BREAKS, REQUEST_ID, TransportError, post, post_stream
from miles.utils.waits import OPEN

MAX_EMPTY_ABORTS = 1000
"""Requests of one sample that may be aborted one after another without a token; an update aborts each once or twice."""

STATUS = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Generate until the response ends.

    An engine that updates its weights aborts requests, and such a request goes on from the tokens it has, on the new
    weights. With `--pause-generation-mode` in_place or retract the engine pauses it instead, and the reply is streamed,
    since one reply may then hold tokens of several versions. Either way `sample.version_spans` says which version
    sampled which token. A streamed reply that breaks off, because its engine died, goes on from the tokens so far. Only
    ids that the engine returned enter `sample.tokens`; nothing is tokenised again.
    """
    state, sample = input.state, input.sample
    if not sample.tokens:
        sample.tokens = prompt_ids(state, sample)
    prompt_len = len(sample.tokens) - sample.response_length
    budget = response_budget(input.sampling_params["max_new_tokens"], prompt_len, state.max_context_len)
    requests = empty = breaks = 0
    while True:
        left = budget - sample.response_length
        if left <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        least = input.sampling_params.get("min_new_tokens", 0) - sample.response_length
        params = {**input.sampling_params, "max_new_tokens": left, "min_new_tokens": min(max(least, 0), left)}
        before = sample.response_length
        requests += 1
        try:
            sample.status = await _request(state, sample, params)
        except TransportError:
            breaks += 1
            if sample.response_length == before or breaks > MOST_BREAKS:
                raise
            sample.status = Sample.Status.ABORTED
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
    tools = tools_of(sample.metadata)
    return list(encode_prompt(state.tokenizer, sample.prompt, state.args.apply_chat_template_kwargs, tools))


def response_budget(max_new_tokens: int, prompt_len: int, max_context_len: int | None) -> int:
    """Tokens that a response may have after a prompt of `prompt_len`; 0 or less when the context is full."""
    return max_new_tokens if max_context_len is None else min(max_new_tokens, max_context_len - prompt_len)


async def _request(state: GenerateState, sample: Sample, params: dict[str, Any]) -> Sample.Status:
    """One `/generate` call; appends what it returned to `sample`."""
    rid = f"{sample.group_index}-{sample.index}-{uuid.uuid4().hex[:12]}"
    payload = {"rid": rid, "input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    url, headers = state.url("/generate"), {REQUEST_ID: rid}
    with OPEN.on("router", "generate", request=rid):
        if state.args.pause_generation_mode == "drain":
            reply, spans = await post(url, payload, headers=headers), None
        else:
            stream = VersionSpans(f"request {rid} (sample {sample.index})")
            payload |= {"stream": True, "extra_key": state.weight_version}
            try:
                await post_stream(url, payload, stream.add, headers=headers)
            except TransportError:
                if stream.spans:  # what has come is sampled and paid for
                    append_reply(sample, stream.cut_off(), rid, params["max_new_tokens"], stream.spans)
                raise
            reply, spans = stream.last, stream.spans
    return append_reply(sample, reply, rid, params["max_new_tokens"], spans)


class VersionSpans:
    """Which weight version sampled which tokens of a streamed reply.

    Chunks are cumulative, and the version of a chunk is that of the tokens that the chunk before it did not have.
    """

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0
        self.spans: list[tuple[int, str]] = []
        """`(start, weight version)` pairs over the reply, as in `Sample.version_spans`."""
        self.last: Any = None
        """The latest chunk; in the end, the whole reply."""

    def cut_off(self) -> dict[str, Any]:
        """The latest chunk as the reply of a request that was aborted there."""
        meta = _meta_info(self.last, self._name)
        return {**self.last, "meta_info": {**meta, "finish_reason": {"type": "abort"}}}

    def add(self, chunk: Any) -> None:
        """Take the next chunk; raises EngineError when it is none, or has fewer tokens than the one before."""
        self.last = chunk
        meta = _meta_info(chunk, self._name)
        count, version = meta.get("completion_tokens"), meta.get("weight_version")
        if not isinstance(count, int) or count < self._count:
            raise EngineError(f"{self._name}: a chunk of {count} completion_tokens followed one of {self._count}")
        if count > self._count:
            if version is None:
                raise EngineError(f"{self._name}: a chunk does not say which weight_version sampled it")
            if not self.spans or self.spans[-1][1] != str(version):
                self.spans.append((self._count, str(version)))
            self._count = count


def append_reply(
    sample: Sample, reply: Any, rid: str, max_new_tokens: int, spans: list[tuple[int, str]] | None = None
) -> Sample.Status:
    """Append the tokens of a `/generate` reply to `sample` and return how the generation ended.

    `spans` are the weight versions of a streamed reply; without them the reply's own is that of all its tokens.
    Raises EngineError naming the request when the reply does not hold exactly one finite log-prob per token, has more
    tokens than were asked for, or ended in a way that is not known.
    """
    name = f"request {rid} (sample {sample.index})"
    meta = _meta_info(reply, name)
    entries: Any = meta.get("output_token_logprobs") or []
    count: Any = meta.get("completion_tokens")
    if not entries and (count or reply.get("output_ids")):
        raise EngineError(
            f"{name}: log-probs were requested but are missing: {count} completion_tokens and no output_token_logprobs"
        )
    reason: dict[str, Any] = meta.get("finish_reason") or {}
    status = STATUS.get(reason.get("type", ""))
    if status is None:
        raise EngineError(f"{name}: finish_reason is {reason!r}; known types are {', '.join(STATUS)}")
    if status is Sample.Status.ABORTED and reason.get("status_code"):
        raise EngineError(f"{name}: refused by the engine: {reason.get('message') or reason}")
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
        if spans is None:
            if "weight_version" not in meta:
                raise EngineError(f"{name}: the reply does not say which weight_version sampled it")
            spans = [(0, str(meta["weight_version"]))]
        text = reply.get("text") or ""
        for (start, version), end in zip(spans, [*(start for start, _ in spans[1:]), len(token_ids)], strict=True):
            sample.append_response(token_ids[start:end], log_probs[start:end], "" if start else text, version)
    sample.cached_tokens += int(meta.get("cached_tokens") or 0)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return status


def _meta_info(reply: Any, name: str) -> dict[str, Any]:
    meta: Any = reply.get("meta_info") if isinstance(reply, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if not isinstance(meta, dict):
        raise EngineError(f"{name}: the reply has no meta_info but is {str(reply)[:200]!r}")
    return cast("dict[str, Any]", meta)
