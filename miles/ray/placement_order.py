"""The order of placement bundles, nodes and addresses: pure functions for whatever puts processes on several nodes.

Ray hands out the bundles of a placement group in no order that one could rely on, and names a node by what it was
started with: a host name here, an IP address there. Placement groups of trainers and of engines with several GPUs sort
by these functions before ranks are given out; ranks next to each other are then on one node.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from miles.errors import EngineError

_DIGITS = re.compile(r"(\d+)")


def address_key(address: str) -> tuple[Any, ...]:
    """Sort key of a node's address: IPv4 by number, then IPv6 by number, then names, in which numbers count as numbers.

    10.0.0.2 is before 10.0.0.10, `node-9` before `node-10`. Any text has a key; different texts have different ones.
    """
    bare, _, scope = address.removeprefix("[").removesuffix("]").partition("%")
    try:
        ip = ipaddress.ip_address(bare)
    except ValueError:
        # Text and digits take turns, beginning with text, so that equal places hold equal types.
        pieces = [int(piece) if i % 2 else piece for i, piece in enumerate(_DIGITS.split(address.lower()))]
        return (2, pieces, address)
    return (0 if ip.version == 4 else 1, int(ip), scope, address)


def bundle_order(bundles: Sequence[tuple[str, int]]) -> list[int]:
    """Indices of `bundles`, each at (node, GPU id), in the order of ranks: node by node, GPUs ascending."""
    return sorted(range(len(bundles)), key=lambda i: (address_key(bundles[i][0]), bundles[i][1], i))


def engine_groups(bundles: Sequence[tuple[str, int]], size: int) -> list[list[int]]:
    """Indices of the bundles of each engine of `size` GPUs, as many engines as there is room for.

    No engine spans nodes while there is a node with room for one; engines larger than every node take what follows each
    other in the order of ranks. GPUs that are left over are in no group. Raises EngineError when not one engine fits.
    """
    order = bundle_order(bundles)
    nodes = [[*of_node] for _, of_node in groupby(order, key=lambda i: bundles[i][0])]
    groups = [node[at : at + size] for node in nodes for at in range(0, len(node) - size + 1, size)]
    if not groups:
        groups = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
    if not groups:
        raise EngineError(
            f"an engine of {size} GPUs does not fit: there are {len(order)}; lower its GPUs, or add nodes"
        )
    return groups


def addresses_of(host: str) -> frozenset[str]:
    """Every IP address that `host` stands for; the name itself when it does not resolve."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM))
    except socket.gaierror:
        return frozenset({bare})


def find_node(
    nodes: Iterable[Mapping[str, Any]], wanted: str, resolve: Callable[[str], Iterable[str]] = addresses_of
) -> Mapping[str, Any]:
    """The entry of `ray.nodes()` that is `wanted`: its node id, or an address by which it can be meant.

    An id decides at once; else addresses are compared as they are written, then by what they resolve to. Raises
    EngineError when no node is meant, or more than one.
    """
    nodes = list(nodes)
    found = [node for node in nodes if node["NodeID"] == wanted]
    found = found or [node for node in nodes if node["NodeManagerAddress"] == wanted]
    if not found:
        meant = set(resolve(wanted))
        found = [node for node in nodes if meant.intersection(resolve(node["NodeManagerAddress"]))]
    if len(found) != 1:
        known = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeID']})" for node in nodes) or "none"
        how_many = f"{len(found)} nodes are" if found else "no node is"
        raise EngineError(f"{how_many} meant by {wanted!r}; give the id of one of the cluster's nodes: {known}")
    return found[0]
