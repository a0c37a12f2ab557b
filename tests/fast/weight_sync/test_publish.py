"""Publishing to a real engine behind the real router, and the proofs that stop a run."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from miles.backends.weight_sync.probes import check_probes, probe_sequences, score_on_engine
from miles.backends.weight_sync.publisher import ProofPlan, Publisher
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.errors import ParityError, StalledError, WeightSyncError
from miles.utils import http_utils
from miles.utils.waits import Waits
from tests.fast.weight_sync.support import (
    BOUNDS,
    TOKEN,
    NullTracker,
    Placed,
    TrainerWeights,
    publishing,
    register,
    workers,
)


@pytest.fixture
def servers(fleet):
    return fleet.engines[0], fleet.router


def story(servers, source, tell):
    """Run `tell(publisher)` against the servers; returns the versions the manager was told, and the router's workers."""
    engine, router = servers
    left = []

    async def then_look(publisher):
        try:
            return await tell(publisher)
        finally:
            left.append(await workers(router))

    result, told = publishing([engine], router, source, then_look, probe_interval=1)
    return result, told + left


def test_a_publish_brings_the_weights_in_several_buckets_and_proves_them(servers, folder):
    source = TrainerWeights(folder)

    async def tell(publisher):
        first = await publisher.publish()
        source.learn()
        second = await publisher.publish()
        return publisher.version, first, second

    (version, first, second), told = story(servers, source, tell)
    assert version == 2
    assert told == [1, 2, [servers[0].url]]
    assert first["parity/probe_mean_diff"] < 1e-5
    assert second["parity/probe_mean_diff"] < 1e-5
    assert first["perf/update_weights_bytes"] == sum(p.nbytes for _, p in source.named())


def broken(source, how):
    def missing(named):
        return named[:-1]

    def stale(named):
        return [(n, p * 0.5 if "norm" not in n else p) for n, p in named]

    if how == "missing":
        source.corrupt = missing
        return "never sent"
    source.corrupt = stale
    source.forge = lambda sent: replace(sent, checksums={**sent.checksums, "model.norm.weight": "other"})
    return "does not hold weight version 1: differing or missing: model.norm.weight"


@pytest.mark.parametrize("how", ["missing", "differing"])
def test_a_publish_that_cannot_be_proven_stops_and_leaves_the_engine_out_of_the_router(servers, folder, how):
    source = TrainerWeights(folder)
    wanted = broken(source, how)

    async def tell(publisher):
        with pytest.raises(WeightSyncError, match=wanted):
            await publisher.publish()
        return publisher.version

    version, told = story(servers, source, tell)
    assert version == 0
    assert told == [[]]


def test_a_trainer_that_learned_but_sends_the_same_weights_is_caught(servers, folder):
    source = TrainerWeights(folder)

    async def tell(publisher):
        await publisher.publish()
        source.learned = True
        with pytest.raises(WeightSyncError, match="exactly the weights of the update before"):
            await publisher.publish()

    story(servers, source, tell)


def test_an_update_drains_requests_in_flight_and_they_keep_the_tokens_so_far(servers, folder):
    _, router = servers
    source = TrainerWeights(folder)
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 240, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }

    async def tell(publisher):
        await publisher.publish()
        requests = [asyncio.create_task(http_utils.post(f"{router.url}/generate", body)) for _ in range(6)]
        await asyncio.sleep(0.1)
        await publisher.publish()
        return await asyncio.gather(*requests)

    answers, _ = story(servers, source, tell)
    ended = {a["meta_info"]["finish_reason"]["type"] for a in answers}
    assert "abort" in ended
    for answer in answers:
        meta = answer["meta_info"]
        assert len(answer["output_ids"]) == len(meta["output_token_logprobs"])
        assert meta["weight_version"] in ("1", "2")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("temperature", "cause: temperature: the engine's log-probs fit temperature 0.35"),
        ("shifted tokens", "cause: tokens"),
        ("stale weights", "cause: weights"),
    ],
)
def test_the_probes_fail_and_name_the_cause(servers, folder, fault, cause):
    engine, _ = servers
    source = TrainerWeights(folder)
    sequences = probe_sequences(2, source.model.config.vocab_size, 64)

    def score(asked, temperature):
        if fault == "temperature":
            return source.score(asked, temperature * 2)
        rows = source.score(asked, temperature)
        return [[*row[1:], row[0]] for row in rows] if fault == "shifted tokens" else rows

    async def tell(publisher):
        await publisher.publish()
        if fault == "stale weights":
            source.learn()
            source.learn()
        theirs = await score_on_engine(engine, sequences, 0.7)
        with pytest.raises(ParityError, match=cause):
            check_probes(engine, theirs, score, sequences, temperature=0.7, bounds=BOUNDS, version=1)

    story(servers, source, tell)


@asynccontextmanager
async def server_that_answers(*routes):
    """A server of this process that answers `routes` and is silent on every other; gives its URL."""

    async def talk(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if any(f"/{route} ".encode() in head for route in routes):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()
        else:
            await reader.read()  # until the client gives up
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def publish_with_little_patience(source, engine, router, told):
    waits = Waits(report_s=0.1, deadline_s=0.4, report=told.append)
    publisher = Publisher(
        source,
        router,
        [engine],
        Placed(),
        None,
        NullTracker(),
        waits,
        version=0,
        first_step=0,
        probe_interval=0,
        proofs=ProofPlan(),
    )
    return publisher.publish()


def test_a_router_that_says_nothing_is_a_named_wait_with_an_end(servers, folder):
    told = []

    async def run():
        async with server_that_answers() as url:
            router = RouterEndpoint(url=url, pid=0, token=TOKEN)
            with pytest.raises(StalledError, match="router: hold dispatch"):
                await publish_with_little_patience(TrainerWeights(folder), servers[0], router, told)
            await http_utils.aclose()

    asyncio.run(run())
    assert any("router: hold dispatch" in text for text in told)


def test_an_engine_that_does_not_flush_is_named_and_leaves_the_router(servers, folder):
    async def run():
        async with server_that_answers("abort_request") as url:
            stuck = EngineEndpoint(url=url, engine_id="engine-1", pid=0, token=TOKEN)
            await register(stuck, servers[1])
            with pytest.raises(StalledError, match="engines: flush their caches"):
                await publish_with_little_patience(TrainerWeights(folder), stuck, servers[1], [])
            state = await http_utils.get(
                f"{servers[1].url}/list_workers", headers={"Authorization": f"Bearer {TOKEN}"}
            )
            await http_utils.aclose()
            return url, state

    url, state = asyncio.run(run())
    assert url not in state["urls"]
    assert not state["held"]
