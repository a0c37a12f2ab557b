import random
import socket

import pytest

from miles.errors import EngineError
from miles.ray.placement_order import address_key, addresses_of, bundle_order, engine_groups, find_node

NODES = [
    {"NodeManagerAddress": "node35", "NodeID": "a"},
    {"NodeManagerAddress": "10.1.0.35", "NodeID": "b"},
]


def resolve(host):
    return [{"node35": "10.1.0.34", "head": "10.1.0.35"}.get(host, host)]


# Case F09.
def test_a_node_is_found_by_id_and_by_any_address_that_means_it():
    assert find_node(NODES, "b", resolve)["NodeID"] == "b"
    assert find_node(NODES, "10.1.0.34", resolve)["NodeID"] == "a"
    assert find_node(NODES, "node35", resolve)["NodeID"] == "a"
    assert find_node(NODES, "head", resolve)["NodeID"] == "b"


def test_a_node_is_found_by_what_the_system_resolves_without_help():
    node = {"NodeManagerAddress": "localhost", "NodeID": "x"}
    assert find_node([node, *NODES[1:]], "127.0.0.1") is node


def test_a_node_that_nobody_or_several_are_is_an_error_with_the_nodes_there_are():
    with pytest.raises(EngineError, match=r"no node is meant by '10\.9\.9\.9'.*node35 \(a\), 10\.1\.0\.35 \(b\)"):
        find_node(NODES, "10.9.9.9", resolve)
    with pytest.raises(EngineError, match="2 nodes are meant by 'any'"):
        find_node(NODES, "any", lambda host: ["10.0.0.1"])


def test_a_name_that_does_not_resolve_stands_for_itself(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert addresses_of("node-3") == {"node-3"}
    assert addresses_of("[fd00::1]") == {"fd00::1"}


# Cases F09, F15: order by node and GPU, node addresses of every form.
def test_bundles_are_in_the_order_of_node_and_gpu():
    bundles = [("n1", 3), ("n2", 0), ("n1", 0), ("n2", 1), ("n1", 1)]
    assert bundle_order(bundles) == [2, 4, 0, 1, 3]
    mixed = [("node35", 0), ("10.0.0.10", 1), ("10.0.0.2", 0), ("fd00::2", 0), ("10.0.0.10", 0)]
    assert bundle_order(mixed) == [2, 4, 1, 3, 0]


# Case F15: engines do not span nodes when they fit.
def test_an_engine_stays_on_a_node_where_one_has_room():
    bundles = [("n1", 3), ("n2", 0), ("n1", 0), ("n2", 1), ("n1", 1)]
    assert engine_groups(bundles, 2) == [[2, 4], [1, 3]]
    assert engine_groups(bundles, 3) == [[2, 4, 0]]
    assert engine_groups(bundles, 1) == [[2], [4], [0], [1], [3]]


def test_an_engine_larger_than_a_node_takes_neighbours_and_one_that_fits_nowhere_is_told():
    bundles = [(node, gpu) for node in ("b", "a") for gpu in (1, 0)]
    assert engine_groups(bundles, 4) == [[3, 2, 1, 0]]
    with pytest.raises(EngineError, match="an engine of 5 GPUs does not fit: there are 4"):
        engine_groups(bundles, 5)


# Case F16.
def test_addresses_are_in_the_order_of_their_numbers():
    wanted = ["10.0.0.2", "10.0.0.7", "10.0.0.10", "10.0.0.66"]
    assert sorted(["10.0.0.7", "10.0.0.66", "10.0.0.2", "10.0.0.10"], key=address_key) == wanted


# Case F16: mixed forms.
def test_mixed_addresses_have_one_order_whatever_order_they_come_in():
    wanted = ["10.0.0.9", "10.0.0.10", "fd00::2", "[fd00::10]", "fe80::1%eth0", "2-node", "node10", "Node-9", "node-a"]
    for seed in range(20):
        shuffled = random.Random(seed).sample(wanted, len(wanted))
        assert sorted(shuffled, key=address_key) == wanted
    odd = ["", "%", "[", "1.2.3", "10.0.0.256", "10.0.0.9%x", "ⅷ", "node-²", "node-1", "NODE-1", "1", "a1b2"]
    assert sorted(sorted(odd, key=address_key, reverse=True), key=address_key) == sorted(odd, key=address_key)
