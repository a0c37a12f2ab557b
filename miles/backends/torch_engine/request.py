"""One generation request: read from JSON, followed while it runs, answered."""

from __future__ import annotations

import difflib
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from miles.backends.torch_engine.alternatives import Alternatives, Entries
from miles.backends.torch_engine.kv_cache import PromptKey
from miles.backends.torch_engine.model import LoadedModel
from miles.backends.torch_engine.sampling import SamplingParams
from miles.backends.torch_engine.stop_strings import INCOMPLETE, StopMatcher

_FIELDS = frozenset(
    {
        "input_ids",
        "text",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "rid",
        "extra_key",
        "stream",
    }
)
_SAMPLING_FIELDS = frozenset({*SamplingParams.__dataclass_fields__, "stream_interval"})
_FIRST_CHUNK_TOKENS = 8
# Fields of the stock server that this engine lacks; a request may carry them with the value that asks for nothing.
_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "return_routed_experts": (None, False),
    "return_indexer_topk": (None, False),
    "return_hidden_states": (None, False),
    "return_text_in_logprobs": (None, False),
    "lora_path": (None,),
    "image_data": (None,),
}
_NEUTRAL_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "logit_bias": (None,),
    "stop_regex": (None,),
}


class RequestRefused(Exception):
    """A request that is not carried out; `status` is the HTTP status of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Progress:
    """The first `count` tokens of a request that runs; `weight_version` sampled those that no chunk had before."""

    request: Request
    count: int
    weight_version: str


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from arrival to answer. The engine thread owns it between `submit` and `done`."""

    input_ids: list[int]
    params: SamplingParams
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    extra_key: str | None = None
    done: Callable[[list[Request]], None] = lambda finished: None
    """Called on the engine thread with the requests that finished in one step and share this callback."""
    stream: bool = False
    """Whether the client is shown the tokens so far while the request runs."""
    stream_interval: int | None = None
    """Tokens from one chunk to the next; None lets the distance grow, so that all chunks together are a small multiple
    of the answer, since each holds everything so far."""
    show: Callable[[Progress], None] = lambda progress: None
    """Called on the engine thread with each chunk of a request that streams."""
    shown: int = 0
    """Tokens in the latest chunk."""
    show_at: int = 1
    """Tokens with which the next chunk is due."""
    stop_ids: frozenset[int] = frozenset()
    matcher: StopMatcher | None = None
    arrived_at: float = field(default_factory=time.monotonic)
    finished_at: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_alternatives: Alternatives = field(default_factory=Alternatives)
    input_logprobs: list[float] | None = None
    input_alternatives: Alternatives = field(default_factory=Alternatives)
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    weight_version: str = ""
    error: str | None = None
    """Why there is no answer; sent with `error_status`."""
    error_status: int = 500
    prompt_key: PromptKey = field(init=False)
    """Names what is computed before the next draw: the prompt, and after a retraction the tokens so far."""

    def __post_init__(self) -> None:
        self.prompt_key = (self.extra_key, tuple(self.input_ids))

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens were asked for and are not there yet."""
        return self.return_logprob and self.logprob_start_len >= 0 and self.input_logprobs is None

    @property
    def wants_alternatives(self) -> bool:
        """Whether log-probabilities of other tokens than the drawn ones were asked for."""
        return self.top_logprobs_num > 0 or bool(self.token_ids_logprob)

    @property
    def longest(self) -> int:
        """Most tokens this request's KV can hold."""
        return max(1, len(self.input_ids) + self.params.max_new_tokens)

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.input_ids) + len(self.output_ids)

    def retract(self) -> None:
        """Go back to the queue, to be resumed by computing the prompt and the tokens so far."""
        self.prompt_key = (self.extra_key, (*self.input_ids, *self.output_ids))

    def show_tokens(self, weight_version: str) -> None:
        """Show a client that streams the tokens that no chunk has had yet, which `weight_version` sampled."""
        count = len(self.output_ids)
        if self.stream and count > self.shown:
            self.shown = count
            self.show_at = count + (self.stream_interval or max(_FIRST_CHUNK_TOKENS, count // 2))
            self.show(Progress(self, count, weight_version))

    def accept(self, token: int, logprob: float) -> bool:
        """Append a drawn token; returns whether the request is finished.

        The order is the stock server's: a request that reaches max_new_tokens ends by length, whatever its last token.
        """
        self.output_ids.append(token)
        self.output_logprobs.append(logprob)
        count = len(self.output_ids)
        if count >= self.params.max_new_tokens:
            self.finish_reason = {"type": "length", "length": count}
        elif token in self.stop_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif self.matcher is not None and (matched := self.matcher.feed(self.output_ids)) is not None:
            self.finish_reason = {"type": "stop", "matched": matched}
        else:
            return False
        return True


def read_request(body: Any, model: LoadedModel, done: Callable[[list[Request]], None]) -> Request:
    """Check the JSON body of /generate; raises RequestRefused (400) that names what is wrong."""
    if not isinstance(body, dict):
        raise RequestRefused("the body of /generate is a JSON object")
    check_fields(body, _FIELDS, _NEUTRAL_FIELDS, "")
    sampling = body.get("sampling_params") or {}
    params = _read_sampling(sampling, model.vocab_size)
    input_ids = _read_prompt(body, model)
    context = model.context_length
    if len(input_ids) > context:
        raise RequestRefused(f"the prompt has {len(input_ids)} tokens, the context holds {context}")
    if sampling.get("max_new_tokens") is None:
        params = _replace_max_new(params, min(params.max_new_tokens, context - len(input_ids)))
    if len(input_ids) + params.max_new_tokens > context:
        raise RequestRefused(
            f"a prompt of {len(input_ids)} tokens and max_new_tokens {params.max_new_tokens} need "
            f"{len(input_ids) + params.max_new_tokens} tokens, the context holds {context}; "
            f"ask for at most {context - len(input_ids)} new tokens"
        )
    interval = typed(sampling, "stream_interval", int, None, "sampling_params.")
    if interval is not None and interval < 1:
        raise RequestRefused(f"sampling_params.stream_interval is {interval}; it must be at least 1")
    return_logprob = typed(body, "return_logprob", bool, False)
    start = typed(body, "logprob_start_len", int, -1)
    if start >= 0 and not return_logprob:
        raise RequestRefused("logprob_start_len needs return_logprob: true")
    if not -1 <= start < len(input_ids):
        raise RequestRefused(f"logprob_start_len {start} lies outside the prompt of {len(input_ids)} tokens")
    top, token_ids = _read_alternatives(body, return_logprob, model.vocab_size)
    if params.stop and model.tokenizer is None:
        raise RequestRefused("stop strings need a tokenizer, and the model folder has none; use stop_token_ids")
    return Request(
        input_ids=input_ids,
        params=params,
        rid=typed(body, "rid", str, None) or uuid.uuid4().hex,
        return_logprob=return_logprob,
        logprob_start_len=start,
        top_logprobs_num=top,
        token_ids_logprob=token_ids,
        extra_key=typed(body, "extra_key", str, None),
        done=done,
        stream=typed(body, "stream", bool, False),
        stream_interval=interval,
        stop_ids=frozenset() if params.ignore_eos else model.eos_token_ids | set(params.stop_token_ids),
        matcher=StopMatcher(params.stop, _text_decoder(model, params)) if params.stop else None,
    )


def answer(request: Request, model: LoadedModel, progress: Progress | None = None) -> dict[str, Any]:
    """The JSON answer of a finished request; with `progress`, a chunk with the tokens so far of a running one."""
    count = len(request.output_ids) if progress is None else progress.count
    ids = request.output_ids[:count]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason if progress is None else None,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": count,
        "cached_tokens": request.cached_tokens,
        "weight_version": request.weight_version if progress is None else progress.weight_version,
        "e2e_latency": (request.finished_at if progress is None else time.monotonic()) - request.arrived_at,
    }
    if request.return_logprob:
        pairs = zip(request.output_logprobs[:count], ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    if request.input_logprobs is not None:
        scored = request.input_ids[request.logprob_start_len :]
        values = [None, *request.input_logprobs]
        meta["input_token_logprobs"] = [[value, token, None] for value, token in zip(values, scored, strict=True)]
    if request.top_logprobs_num:
        meta["input_top_logprobs"] = _of_prompt(request, request.input_alternatives.top)
        meta["output_top_logprobs"] = request.output_alternatives.top[:count]
    if request.token_ids_logprob:
        meta["input_token_ids_logprobs"] = _of_prompt(request, request.input_alternatives.by_id)
        meta["output_token_ids_logprobs"] = request.output_alternatives.by_id[:count]
    text = output_text(request, model) if progress is None else text_so_far(ids, request, model)
    return {"text": text, "output_ids": ids, "meta_info": meta}


def _of_prompt(request: Request, positions: list[Entries]) -> list[Entries | None]:
    """One item per scored prompt token, of which the first has no prediction; empty when none was scored."""
    return [] if request.input_logprobs is None else [None, *positions]


def output_text(request: Request, model: LoadedModel) -> str:
    """The text of the output, up to what stopped it; empty without a tokenizer."""
    if model.tokenizer is None or not request.output_ids:
        return ""
    ids = request.output_ids
    matched = (request.finish_reason or {}).get("matched")
    trim = matched is not None and not request.params.no_stop_trim
    if trim and isinstance(matched, int):
        ids = ids[:-1]
    text = _text_decoder(model, request.params)(ids)
    if trim and isinstance(matched, str) and (cut := text.find(matched)) >= 0:
        text = text[:cut]
    return text


def text_so_far(ids: list[int], request: Request, model: LoadedModel) -> str:
    """The text of a running request's first tokens, without a character that is not complete yet."""
    return "" if model.tokenizer is None else _text_decoder(model, request.params)(ids).rstrip(INCOMPLETE)


def _text_decoder(model: LoadedModel, params: SamplingParams) -> Callable[[list[int]], str]:
    tokenizer = model.tokenizer
    assert tokenizer is not None  # both callers have looked

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(
            ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    return decode


def check_known(body: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Raise RequestRefused for the first field that is not known, with the nearest name."""
    for name in body:
        if name not in known:
            near = difflib.get_close_matches(str(name), sorted(known), n=1)
            hint = f"; did you mean {where}{near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
            raise RequestRefused(f"unknown field {where}{name}{hint}")


def check_fields(
    body: Mapping[str, Any], known: frozenset[str], neutral: Mapping[str, tuple[Any, ...]], where: str = ""
) -> None:
    """Raise RequestRefused for a field that is not known, or `neutral` with a value that asks for something."""
    if body.keys() <= known and not body.keys() & neutral.keys():
        return
    check_known(body, {*known, *neutral}, where)
    for name in body.keys() & neutral.keys():
        if body[name] not in neutral[name]:
            raise RequestRefused(
                f"{where}{name} = {body[name]!r} is not supported by the torch engine; leave it out or send "
                f"{neutral[name][-1]!r}"
            )


def _read_prompt(body: Mapping[str, Any], model: LoadedModel) -> list[int]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise RequestRefused("give exactly one of input_ids and text")
    if ids is None:
        if not isinstance(text, str):
            raise RequestRefused("text is one string; send several prompts as several requests")
        if model.tokenizer is None:
            raise RequestRefused("text needs a tokenizer, and the model folder has none; send input_ids")
        ids = list(model.tokenizer.encode(text))
    if not isinstance(ids, list) or not ids:
        raise RequestRefused("input_ids is a list of at least one token id")
    if set(map(type, ids)) != {int}:
        raise RequestRefused("input_ids is one flat list of integers; send several prompts as several requests")
    smallest, largest = min(ids), max(ids)
    if smallest < 0 or largest >= model.vocab_size:
        bad = smallest if smallest < 0 else largest
        raise RequestRefused(f"input_ids holds {bad}, outside the vocabulary of {model.vocab_size} tokens")
    return ids


def _read_alternatives(body: Mapping[str, Any], return_logprob: bool, vocab_size: int) -> tuple[int, tuple[int, ...]]:
    top, ids = typed(body, "top_logprobs_num", int, 0), typed(body, "token_ids_logprob", list, None)
    if not 0 <= top <= vocab_size:
        raise RequestRefused(f"top_logprobs_num is {top}; it must be between 0 and the vocabulary's {vocab_size}")
    if ids is not None and (not ids or any(type(i) is not int or not 0 <= i < vocab_size for i in ids)):
        raise RequestRefused(
            f"token_ids_logprob is {ids}; it must be a list of at least one token id below {vocab_size}"
        )
    if (top or ids) and not return_logprob:
        raise RequestRefused("top_logprobs_num and token_ids_logprob need return_logprob: true")
    return top, tuple(ids or ())


def _read_sampling(body: Any, vocab_size: int) -> SamplingParams:
    if not isinstance(body, dict):
        raise RequestRefused("sampling_params is a JSON object")
    where = "sampling_params."
    check_fields(body, _SAMPLING_FIELDS, _NEUTRAL_SAMPLING, where)
    temperature = _number(body, "temperature", 1.0)
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    stop_ids = body.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestRefused(f"{where}stop is a string or a list of strings, none of them empty")
    if not isinstance(stop_ids, list) or not all(type(i) is int for i in stop_ids):
        raise RequestRefused(f"{where}stop_token_ids is a list of integers")
    if any(not 0 <= i < vocab_size for i in stop_ids):
        raise RequestRefused(f"{where}stop_token_ids {stop_ids} leaves the vocabulary of {vocab_size} tokens")
    params = SamplingParams(
        temperature=0.0 if 0 <= temperature < 1e-6 else temperature,
        top_p=_number(body, "top_p", 1.0),
        top_k=typed(body, "top_k", int, -1, where),
        min_p=_number(body, "min_p", 0.0),
        max_new_tokens=typed(body, "max_new_tokens", int, 128, where),
        min_new_tokens=typed(body, "min_new_tokens", int, 0, where),
        stop=tuple(stops),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=typed(body, "ignore_eos", bool, False, where),
        skip_special_tokens=typed(body, "skip_special_tokens", bool, True, where),
        no_stop_trim=typed(body, "no_stop_trim", bool, False, where),
        spaces_between_special_tokens=typed(body, "spaces_between_special_tokens", bool, True, where),
        sampling_seed=typed(body, "sampling_seed", int, None, where),
    )
    for name, ok, rule in (
        ("temperature", params.temperature >= 0, "0 (greedy) or more"),
        ("top_p", 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k == -1 or params.top_k >= 1, "-1 (all) or at least 1"),
        ("min_p", 0 <= params.min_p <= 1, "between 0 and 1"),
        ("max_new_tokens", params.max_new_tokens >= 0, "0 or more"),
        ("min_new_tokens", 0 <= params.min_new_tokens <= params.max_new_tokens, "between 0 and max_new_tokens"),
    ):
        if not ok:
            raise RequestRefused(f"{where}{name} is {getattr(params, name)}; it must be {rule}")
    return params


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestRefused(f"sampling_params.{name} is {value!r}; it must be a number")
    return float(value)


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any, where: str = "") -> Any:
    """A field of exactly one type, or the default for none; raises RequestRefused for another type."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestRefused(f"{where}{name} is {value!r}; it must be of type {kind.__name__}")
    return value


def _replace_max_new(params: SamplingParams, count: int) -> SamplingParams:
    return replace(params, max_new_tokens=count, min_new_tokens=min(params.min_new_tokens, count))
