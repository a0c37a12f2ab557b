"""`/v1/chat/completions`: messages rendered once by the tokenizer's chat template, answered in OpenAI's shape."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError

from miles.backends.torch_engine.model import LoadedModel
from miles.backends.torch_engine.request import Request, RequestRefused, check_fields, output_text, read_request, typed

_NATIVE_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim",
    "seed": "sampling_seed",
}
_OWN_FIELDS = {
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "chat_template_kwargs",
    "rid",
    "extra_key",
}
_FIELDS = frozenset(_OWN_FIELDS | set(_NATIVE_SAMPLING))
_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stream": (None, False),
    "stream_options": (None,),
    "tools": (None, []),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None,),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None,),
    "user": (None,),
}
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"})


def read_chat(
    body: Any, model: LoadedModel, done: Callable[[list[Request]], None]
) -> tuple[Request, Callable[[], dict[str, Any]]]:
    """Check a chat request; returns it and what writes its answer. Raises RequestRefused that names what is wrong.

    Without a limit, the answer may fill the context.
    """
    if not isinstance(body, dict):
        raise RequestRefused("the body of /v1/chat/completions is a JSON object")
    check_fields(body, _FIELDS, _NEUTRAL_FIELDS)
    name = typed(body, "model", str, model.path)
    input_ids = _render(body, model)
    logprobs, top = typed(body, "logprobs", bool, False), typed(body, "top_logprobs", int, 0)
    if top and not logprobs:
        raise RequestRefused("top_logprobs needs logprobs: true")
    limits = {typed(body, field, int, None) for field in ("max_tokens", "max_completion_tokens")} - {None}
    if len(limits) > 1:
        raise RequestRefused("max_tokens and max_completion_tokens differ; give one of them")
    sampling = {native: body[field] for field, native in _NATIVE_SAMPLING.items() if field in body}
    sampling["max_new_tokens"] = limits.pop() if limits else max(0, model.context_length - len(input_ids))
    native = {
        "input_ids": input_ids,
        "sampling_params": sampling,
        "return_logprob": logprobs,
        "top_logprobs_num": top,
        "rid": body.get("rid"),
        "extra_key": body.get("extra_key"),
    }
    try:
        request = read_request(native, model, done)
    except RequestRefused as refusal:
        raise RequestRefused(str(refusal).replace("sampling_params.", ""), refusal.status) from refusal
    return request, lambda: _completion(request, model, name)


def _render(body: Mapping[str, Any], model: LoadedModel) -> list[int]:
    tokenizer = model.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestRefused(
            f"{model.path} has no {'tokenizer' if tokenizer is None else 'chat template'}; "
            "use /generate with input_ids, or add a chat_template.jinja to the model folder"
        )
    messages, extra = body.get("messages"), typed(body, "chat_template_kwargs", dict, {})
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages is a list of at least one message")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    assert tokenizer is not None  # it has a chat template
    own = sorted(extra.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys())
    if own:
        raise RequestRefused(f"chat_template_kwargs holds {', '.join(own)}, which a request cannot choose")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
    except (TemplateError, TypeError, ValueError) as error:
        raise RequestRefused(f"the chat template of {model.path} refuses the messages: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise RequestRefused(f"{where} is {message!r}; it must be an object with role and content")
    check_fields(message, _MESSAGE_FIELDS, {}, f"{where}.")
    if not isinstance(message.get("role"), str):
        raise RequestRefused(f"{where}.role is {message.get('role')!r}; it must be a string")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestRefused(f"{where}.content is {content!r}; the torch engine reads one string")


def _completion(request: Request, model: LoadedModel, name: str) -> dict[str, Any]:
    reason = request.finish_reason or {}
    prompt, completion = len(request.input_ids), len(request.output_ids)
    return {
        "id": request.rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": output_text(request, model)},
                "logprobs": {"content": _logprobs(request, model)} if request.return_logprob else None,
                "finish_reason": reason.get("type"),
                "matched_stop": reason.get("matched"),
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        },
        "metadata": {"weight_version": request.weight_version},
    }


def _logprobs(request: Request, model: LoadedModel) -> list[dict[str, Any]]:
    top = request.output_alternatives.top or [[]] * len(request.output_ids)
    return [
        {
            **_token(token, logprob, model),
            "top_logprobs": [_token(other, value, model) for value, other, _ in entries],
        }
        for token, logprob, entries in zip(request.output_ids, request.output_logprobs, top, strict=True)
    ]


def _token(token: int, logprob: float, model: LoadedModel) -> dict[str, Any]:
    assert model.tokenizer is not None  # the request was rendered by it
    text = model.tokenizer.decode([token])
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}
