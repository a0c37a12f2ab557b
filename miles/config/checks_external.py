"""What a run with engines that somebody else started needs: their addresses, and no setting that is for engines of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from miles.config.resources import needs_engines
from miles.config.schema import EngineConfig, RunConfig
from miles.errors import Issue

ADDRS = "engine.external_addrs"
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_OTHERS_MEMORY = "the servers' memory is theirs who started them"


def external_engines_have_addresses(cfg: RunConfig) -> Iterator[Issue]:
    addresses = cfg.engine.external_addrs
    if not cfg.engine.external:
        if addresses:
            yield Issue(ADDRS, "are given, but the run starts engines of its own", "--rollout-external as well")
        if cfg.engine.external_admin_key_env is not None:
            problem = "names a key for servers, but the run starts engines of its own"
            yield Issue("engine.external_admin_key_env", problem, "leave out --rollout-external-admin-key-env")
        return
    if not addresses:
        fix = "--rollout-external-engine-addrs HOST:PORT [HOST:PORT ...]"
        yield Issue(ADDRS, "--rollout-external attaches to servers, and none is given", fix)
    for address in addresses:
        found = ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[2]) < 65536:
            yield Issue(ADDRS, f"{address!r} is not an address", "HOST:PORT, IPv6 as [HOST]:PORT, without http://")
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        yield Issue(ADDRS, f"{', '.join(twice)} is given twice", "give each server once")


def external_engines_are_left_as_they_are(cfg: RunConfig) -> Iterator[Issue]:
    """Settings that say how an engine is started, or what its memory is used for, are not for other people's servers."""
    if not cfg.engine.external:
        return
    if not needs_engines(cfg):
        yield Issue("engine.external", "attaches to engines, and the run needs none", "leave out --rollout-external")
    if cfg.cluster.colocate:
        yield Issue(
            "cluster.colocate", f"lets engines give their memory up, and {_OTHERS_MEMORY}", "leave out --colocate"
        )
    if cfg.cluster.offload_rollout:
        yield Issue("cluster.offload_rollout", f"{_OTHERS_MEMORY}", "leave out --offload-rollout")
    if cfg.cluster.rollout_engines not in (1, len(cfg.engine.external_addrs)):
        problem = f"asks for {cfg.cluster.rollout_engines} engines, and {len(cfg.engine.external_addrs)} are given"
        yield Issue("cluster.rollout_engines", problem, "leave out --rollout-engines: every address is one")
    defaults = EngineConfig()
    for path, flag, given in (
        ("engine.sglang", "--sglang-*", cfg.engine.sglang != defaults.sglang),
        (
            "engine.max_running_requests",
            "--engine.max-running-requests",
            cfg.engine.max_running_requests != defaults.max_running_requests,
        ),
    ):
        if given:
            problem = "says how an engine is started, and these have been"
            yield Issue(path, problem, f"leave out {flag}, and start the servers with it")


EXTERNAL_CHECKS = (external_engines_have_addresses, external_engines_are_left_as_they_are)
