"""What a run with engines that somebody else started needs of them and of the machine, looked at before anything starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from miles.config.checks_external import ADDRESS, ADDRS
from miles.config.resources import admin_key, expected_server, needs_engines, weights_transport
from miles.config.schema import RunConfig
from miles.errors import EngineError, Issue
from miles.utils.engine_facts import ServerFacts, differences, read_facts


def tensors_stay_on_this_machine(cfg: RunConfig) -> Iterator[Issue]:
    if not cfg.engine.external or weights_transport(cfg) != "tensor":
        return
    far = [address for address in cfg.engine.external_addrs if not _is_here(address)]
    if far:
        yield Issue(
            "weights.transport",
            f"tensor shares memory of one machine, and {', '.join(far)} is another",
            "--update-weight-transfer-mode disk, with a folder that both see, or broadcast",
        )


def the_admin_key_is_there(cfg: RunConfig) -> Iterator[Issue]:
    name = cfg.engine.external_admin_key_env
    if cfg.engine.external and name is not None and not os.environ.get(name):
        problem = f"the environment has no {name}, or an empty one"
        yield Issue(
            "engine.external_admin_key_env", problem, f"export {name} before the run, or name another variable"
        )


def external_engines_fit(cfg: RunConfig) -> Iterator[Issue]:
    """Every server answers, and is what the run expects."""
    addresses = [address for address in dict.fromkeys(cfg.engine.external_addrs) if ADDRESS.fullmatch(address)]
    if not cfg.engine.external or not needs_engines(cfg) or not addresses:
        return
    token = admin_key(cfg)
    with ThreadPoolExecutor(len(addresses)) as threads:
        answers = list(threads.map(partial(_facts_or_why_not, token=token), addresses))
    expected, kinds = expected_server(cfg), set[str]()
    for address, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, ServerFacts):
            kinds.add(answer.kind)
            for found in differences(answer, expected):
                yield Issue(ADDRS, f"the server at {address} {found.problem}", found.fix)
        else:
            yield Issue(ADDRS, answer, f"start the server, or leave {address} out")
    if len(kinds) > 1 and weights_transport(cfg) == "tensor":
        problem = "tensor writes weights for one kind of engine, and the servers are of both"
        yield Issue("weights.transport", problem, "--update-weight-transfer-mode disk, or servers of one kind")


def _facts_or_why_not(address: str, token: str) -> ServerFacts | str:
    try:
        return read_facts(address, token)
    except EngineError as error:
        return error.message


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's: this process could listen there."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: int, where: tuple[object, ...]) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind(where)
        except OSError:
            return False
    return True


EXTERNAL_PREFLIGHT = (the_admin_key_is_there, tensors_stay_on_this_machine, external_engines_fit)
