"""Tensor updates from several trainer ranks, each to the engines on its own GPU."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from miles.backends.weight_sync.ranks import deal, route
from miles.core.run_facts import EngineEndpoint
from tests.fast.weight_sync.support import BUCKET_BYTES

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = EngineEndpoint(url="http://127.0.0.1:9", engine_id="engine", pid=1, token="")


def at(*gpus):
    return replace(NOWHERE, tp=max(1, len(gpus)), gpu_ids=gpus)


def test_each_process_of_an_engine_gets_the_payload_of_the_rank_on_its_gpu():
    ranks = [("4",), ("GPU-b",), ("6",), ("7",)]
    assert route([at("4", "GPU-b"), at("7", "6")], ranks) == [(0, 1), (3, 2)]


def test_a_process_on_a_gpu_without_a_rank_gets_rank_0s_payload():
    assert route([at("0", "1"), at("2", "3")], [("0",), ("2",)]) == [(0, 0), (1, 0)]
    assert route([NOWHERE, replace(NOWHERE, tp=2)], [("0",), ("1",)]) == [(0,), (0, 0)]


def test_ranks_that_share_a_gpu_leave_it_to_the_first():
    assert route([at("0"), at("1")], [("0",), ("1",), ("0",), ("1",)]) == [(0,), (1,)]


def test_every_payload_goes_to_one_process_and_stays_in_its_place_in_the_list():
    routes = route([at("0", "1"), at("1", "2"), at("0", "9")], [("0",), ("1",), ("2",)])
    assert deal(routes, [["a0", "a1", "a2"], ["b0", "b1"], ["c0"]]) == [["a0", "b0"], ["b1", "c0"], ["a1", "a2"]]


@pytest.fixture(scope="module")
def played(fleet, folder, tmp_path_factory):
    """What became of each case at each rank; the last leaves the engines with what they loaded."""
    place = tmp_path_factory.mktemp("ranks")
    first, second = fleet.engines

    def case(name, *gpus, engines=(first, second), ranks=(("0",), ("1",)), fails=None, scale=1.0):
        placed = [asdict(replace(engine, gpu_ids=(gpu,))) for engine, gpu in zip(engines, gpus, strict=True)]
        return {"name": name, "engines": placed, "gpus": ranks, "fails": fails or {}, "scale": scale}

    cases = [
        case("crossed", "1", "0", scale=1.25),
        case("three", "1", "9", ranks=(("0",), ("1",), ("2",)), scale=0.75),
        case("fails0", "1", "0", fails={"0": 1}),
        case("fails1", "1", "0", fails={"1": 1}),
        case("refused", "1", "0", engines=(first, replace(second, token="wrong"))),
        case("whole", "0", "0"),
    ]
    common = {"folder": str(folder), "bucket_bytes": BUCKET_BYTES}
    paths = {
        name: {"store": f"{place}/store-{name}", "run_dir": f"{place}/{name}"} for name in (c["name"] for c in cases)
    }
    cases = [{**c, **common, **paths[c["name"]]} for c in cases]
    (place / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.fast.weight_sync.update_ranks", str(place)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {c["name"]: [read(place, c["name"], rank) for rank in range(len(c["gpus"]))] for c in cases}


def read(place, name, rank):
    log = (place / name / "logs" / f"trainer-{rank}.log").read_text()
    return {**json.loads((place / f"{name}.{rank}.json").read_text()), "log": log}


def held_by_all(fleet, found):
    return found["held"] == {engine.engine_id: found["wanted"] for engine in fleet.engines}


def test_each_engine_maps_the_memory_of_the_rank_on_its_gpu_and_all_hold_the_same(fleet, played):
    one, two = played["crossed"]
    assert "not sent" not in two["log"]
    assert held_by_all(fleet, one)
    assert one["buckets"] > 2
    assert one["posts"] == [[[b], [a]] for a, b in zip(one["segments"], two["segments"], strict=True)]


def test_a_rank_whose_payload_nobody_wants_encodes_nothing(fleet, played):
    one, two, three = played["three"]
    assert held_by_all(fleet, one)
    assert len(one["segments"]) == len(two["segments"]) == one["buckets"]
    assert one["posts"] == [[[b], [a]] for a, b in zip(one["segments"], two["segments"], strict=True)]
    assert three["segments"] == []


def test_where_all_engines_are_on_the_gpu_of_rank_0_it_sends_alone(fleet, played):
    one, two = played["whole"]
    assert held_by_all(fleet, one)
    assert one["posts"] == [[[a], [a]] for a in one["segments"]]
    assert two["segments"] == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_encode_ends_the_update_at_all_ranks_with_the_reason(played, failing):
    one, two = played[f"fails{failing}"]
    assert one["type"] == "WeightSyncError"
    assert f"could not be prepared by trainer rank {failing}: OSError: no room for a bucket" in one["error"]
    assert f"weights 1 were not sent: {one['error']}" in two["log"]
    assert [len(one["segments"]), len(two["segments"])] == ([1, 2] if failing == 0 else [2, 1])
    assert len(one["posts"]) == 1


def test_an_engine_that_refuses_ends_the_update_at_all_ranks_with_the_reason(played):
    one, two = played["refused"]
    assert one["type"] == "HttpError"
    assert "401" in one["error"]
    assert f"weights 1 were not sent: {one['error']}" in two["log"]


def test_the_ranks_go_on_together_whatever_became_of_an_update(played):
    for ranks in played.values():
        for found in ranks:
            assert found["gathered"] == len(found["wanted"])


def test_memory_is_there_until_all_engines_have_answered_and_is_freed_once(played):
    for ranks in played.values():
        assert all(ranks[0]["kept"])
        for found in ranks:
            assert found["frees"] == [True] * len(found["segments"])
