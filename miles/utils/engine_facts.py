"""What an inference server that somebody else started says of itself, and where that is not what a run expects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal

from miles.errors import EngineError
from miles.utils.model_dtype import model_config, model_dtype

ANSWER_S = 5.0
"""Seconds in which a server must have answered what it is."""
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Entries of config.json that two models which take the same weights have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What `/model_info` and `/server_info` say; None where they say nothing."""

    kind: Literal["torch", "sglang"]
    pid: int
    model_path: str
    model: Mapping[str, Any]
    """Entries of `SHAPE`, as far as the server tells them or its model folder is seen from here."""
    dtype: str
    """As the server was told, with `auto` resolved where its model folder is seen from here."""
    tp: int
    dp: int
    context_length: int | None
    deterministic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedServer:
    """What a run expects of every server."""

    kind: Literal["auto", "torch", "sglang"]
    model_folder: str
    dtype: str
    tp: int
    context_length: int | None
    """Tokens that a request may have."""
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a server is not what the run expects."""

    problem: str
    fix: str


def read_facts(address: str, token: str) -> ServerFacts:
    """Ask the server at `host:port`. Raises EngineError when it does not answer as an engine does."""
    model = _get(address, "/model_info", token)
    server = _get(address, "/server_info", token)
    try:
        return _facts(model, server)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"what answers at {address} is neither SGLang nor Miles's torch engine: its /model_info and /server_info lack "
            f"what these say ({type(error).__name__}: {error})"
        ) from error


def differences(facts: ServerFacts, expected: ExpectedServer) -> Iterator[Difference]:
    """Everything in which `facts` are not what is `expected`."""
    wanted = model_config(expected.model_folder)
    for name in SHAPE:
        if name in facts.model and name in wanted and facts.model[name] != wanted[name]:
            yield Difference(
                f"serves a model of {name} {facts.model[name]} ({facts.model_path}), and the run's has {wanted[name]} "
                f"({expected.model_folder})",
                f"start it with --model-path {expected.model_folder}, or give its model as --hf-checkpoint",
            )
            break  # another model differs in most of them
    if expected.kind not in ("auto", facts.kind):
        yield Difference(
            f"is {facts.kind}, and --engine-backend is {expected.kind}", f"--engine-backend {facts.kind}, or auto"
        )
    if facts.dtype not in ("auto", expected.dtype):
        yield Difference(
            f"computes in {facts.dtype}, and the run expects {expected.dtype}",
            f"--sglang-dtype {facts.dtype}, or start it with --dtype {expected.dtype}",
        )
    if facts.tp != expected.tp:
        yield Difference(
            f"shares its model among {facts.tp} processes, and the run expects {expected.tp}",
            f"--rollout-num-gpus-per-engine {facts.tp}",
        )
    if facts.dp != 1:
        yield Difference(
            f"has a data-parallel size of {facts.dp}, and weights are sent to one copy of the model",
            f"start {facts.dp} servers without --dp-size, and give all their addresses",
        )
    yield from _length_differences(facts.context_length, expected.context_length)
    if expected.deterministic and not facts.deterministic:
        yield Difference(
            "does not decode deterministically, and the run has --deterministic-mode",
            "start it with --enable-deterministic-inference",
        )


def _length_differences(has: int | None, needs: int | None) -> Iterator[Difference]:
    if has is not None and needs is not None and has < needs:
        yield Difference(
            f"takes requests of {has} tokens, and the run's may have {needs}",
            f"--rollout-max-context-len {has}, or start it with --context-length {needs}",
        )


def _facts(model: Mapping[str, Any], server: Mapping[str, Any]) -> ServerFacts:
    kind: Literal["torch", "sglang"] = "torch" if server.get("engine") == "torch" else "sglang"
    path = str(model["model_path"])
    folder = model_config(path)
    told = {name: model[name] for name in SHAPE if model.get(name) is not None}
    dtype = str(server["dtype"])
    return ServerFacts(
        kind=kind,
        pid=int(server.get("pid") or 0),
        model_path=path,
        model={name: folder[name] for name in SHAPE if name in folder} | told,
        dtype=model_dtype(path) if dtype == "auto" and folder else dtype,
        tp=1 if kind == "torch" else int(server["tp_size"]),
        dp=1 if kind == "torch" else int(server["dp_size"]),
        context_length=model.get("context_length") or server.get("context_length"),
        deterministic=bool(server.get("enable_deterministic_inference")),
    )


def _get(address: str, route: str, token: str) -> Mapping[str, Any]:
    from miles.utils.http_utils import split_host_port  # its client takes long to import

    host, port = split_host_port(address)
    connection = HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", route, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, HTTPException) as error:
        what = f"within {ANSWER_S:.0f} s" if isinstance(error, TimeoutError) else f"({error or type(error).__name__})"
        raise EngineError(f"no server answers at {address} {what}") from error
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        text = content.decode(errors="replace")[:200]
        raise EngineError(f"the server at {address} answers {route} with status {answer.status}: {text}")
    try:
        data = json.loads(content)
    except ValueError as error:
        raise EngineError(f"what answers at {address} is no engine: {route} gives no JSON") from error
    if not isinstance(data, dict):
        raise EngineError(f"what answers at {address} is no engine: {route} gives no JSON object")
    return data
