"""The same weights by each transport, to one and to two real engines, and what happens when an engine dies or hangs."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from miles.backends.weight_sync import lifecycle
from miles.backends.weight_sync.broadcast import BroadcastTransport
from miles.backends.weight_sync.checksum import checksum_tensor
from miles.backends.weight_sync.disk import DiskTransport
from miles.backends.weight_sync.publisher import ProofPlan, Publisher
from miles.errors import EngineError, WeightSyncError
from miles.utils import http_utils
from miles.utils.waits import Waits
from tests.fast.weight_sync.support import (
    BUCKET_BYTES,
    NullTracker,
    Placed,
    TrainerWeights,
    endpoint,
    publishing,
    start_engine,
    workers,
)

TRANSPORTS = ["tensor", "broadcast", "disk"]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_engine_gets_exactly_the_trainers_weights(fleet, folder, tmp_path, transport, number):
    engines = fleet.engines[:number]
    source = TrainerWeights(folder, transport, tmp_path / "weights")

    async def tell(publisher):
        metrics = [await publisher.publish()]
        for _ in range(2):
            source.learn()
            metrics.append(await publisher.publish())
        return metrics, await lifecycle.checksums(engines), await lifecycle.versions(engines)

    proofs = ProofPlan(transport=transport, starts_from_folder=False, reload_interval=3)
    (metrics, held, versions), told = publishing(engines, fleet.router, source, tell, probe_interval=2, proofs=proofs)
    wanted = {name: checksum_tensor(tensor) for name, tensor in source.named()}
    assert held == {engine.engine_id: wanted for engine in engines}
    assert set(versions.values()) == {"3"}
    assert told == [1, 2, 3]
    assert source.ways == [transport] * 3 + ["tensor" if transport == "disk" else "disk"]
    assert metrics[-1]["perf/update_weights_bytes"] == sum(t.nbytes for _, t in source.named())
    assert metrics[-1]["perf/verify_weights_time"] > 0
    assert [p.name for p in (tmp_path / "weights").iterdir()] == [".lock"]


def test_a_parameter_that_the_engine_does_not_have_is_refused_by_name_and_the_next_broadcast_works(fleet, folder):
    """G16: names of another tree."""
    source = TrainerWeights(folder, "broadcast")
    source.corrupt = lambda named: [
        ("language_model." + n if n.startswith("model.layers.1") else n, t) for n, t in named
    ]

    async def tell(publisher):
        with pytest.raises(EngineError, match="not a parameter") as raised:
            await publisher.publish()
        out = await workers(fleet.router)
        source.corrupt = lambda named: named
        for engine in fleet.engines:
            assert await publisher.bring_up(engine) is False  # nothing was published yet
        await publisher.publish()
        return str(raised.value), out, await lifecycle.versions(fleet.engines)

    (message, out, versions), _ = publishing(fleet.engines, fleet.router, source, tell)
    assert "language_model.model.layers.1.self_attn.q_proj.weight is not a parameter" in message
    assert "nearest: model.layers.1.self_attn.q_proj.weight" in message
    assert out == []
    assert set(versions.values()) == {"1"}


def test_a_parameter_that_is_left_out_is_named_by_the_update_over_garbage(fleet, folder):
    """G15: what was not sent is found even where the list of what to send lacks it too."""
    engine = fleet.engines[0]
    source = TrainerWeights(folder)
    left_out = "model.layers.0.mlp.up_proj.weight"

    async def heal(publisher):
        return await publisher.publish()

    publishing([engine], fleet.router, source, heal)
    source.corrupt = lambda named: [(n, t) for n, t in named if n != left_out]
    source.named = lambda: [(n, p.detach()) for n, p in source.model.named_parameters() if n != left_out]

    async def tell(publisher):
        with pytest.raises(WeightSyncError, match="did not restore the weights that the engines loaded") as raised:
            await publisher.publish()
        return str(raised.value), await workers(fleet.router)

    proofs = ProofPlan(starts_from_folder=True)
    (message, left), told = publishing([engine], fleet.router, source, tell, proofs=proofs)
    assert f"1 parameters differ from the snapshot: {left_out}" in message
    assert (left, told) == ([], [])


def test_an_engine_whose_second_load_path_gives_other_weights_is_caught(fleet, folder, tmp_path):
    engine = fleet.engines[0]
    source = TrainerWeights(folder, "tensor", tmp_path / "weights")

    def corrupt(named):
        if source.ways[-1] == "disk":
            return [(n, t * 2 if n == "model.norm.weight" else t) for n, t in named]
        return named

    source.corrupt = corrupt

    async def tell(publisher):
        with pytest.raises(WeightSyncError, match=r"sent again with other values.*model\.norm\.weight"):
            await publisher.publish()

    proofs = ProofPlan(reload_interval=1)
    publishing([engine], fleet.router, source, tell, proofs=proofs)


def test_a_tied_head_follows_the_embedding_and_the_folder_stays_tied(fleet, folder, tmp_path):
    """G09: the folder that an engine loads holds no head, and config.json still ties it."""
    source = TrainerWeights(folder, "disk", tmp_path / "weights")
    seen = {}
    disk = source.by("disk")
    write = disk._write

    def spy(*args):
        target = write(*args)
        for file in target.glob("*.safetensors"):
            with safe_open(file, framework="pt") as stream:
                seen.update(dict.fromkeys(stream.keys(), file.name))
        seen["config"] = (target / "config.json").read_text()
        return target

    disk._write = spy

    async def tell(publisher):
        source.learn()
        return await publisher.publish()

    metrics, _ = publishing(fleet.engines[:1], fleet.router, source, tell, probe_interval=1)
    assert metrics["parity/probe_mean_diff"] < 1e-5  # the head, too, is the new one
    assert '"tie_word_embeddings": true' in seen.pop("config")
    assert set(seen) == {name for name, _ in source.named()}
    assert len(set(seen.values())) > 1


def test_weights_are_compared_in_the_dtype_that_the_engine_holds(folder, tmp_path):
    """G15: fp32 weights sent to a bf16 engine are equal after the cast, by every transport; uncast ones are refused."""
    process = start_engine("engine-bf16", folder, tmp_path / "log", "--dtype", "bfloat16")
    try:
        engine = endpoint(process)
        source = TrainerWeights(folder, "broadcast", tmp_path / "weights", dtype=torch.bfloat16)

        async def tell():
            names = dict(source.named())
            for version, transport in enumerate(TRANSPORTS, start=1):
                source.learn()
                sent = await source.send_weights([engine], version, transport)
                assert (await lifecycle.checksums([engine]))["engine-bf16"] == dict(sent.checksums)
            source.dtype = torch.float32
            with pytest.raises(EngineError, match="dtype float32, the engine's is bfloat16"):
                await source.send_weights([engine], 4)
            await http_utils.aclose()
            return names

        asyncio.run(tell())
        source.close()
    finally:
        process.stop()


class Victim:
    """An engine that tests stop or kill.

    `start` starts it again, from the main thread: a process of ours dies with the thread that started it.
    """

    def __init__(self, folder, log):
        self.folder, self.log = folder, log
        self.start()

    def start(self):
        self.process = start_engine("victim", self.folder, self.log)
        self.engine = endpoint(self.process)
        return self.engine


@pytest.fixture(scope="module")
def victim(folder, tmp_path_factory):
    victim = Victim(folder, tmp_path_factory.mktemp("victim") / "log")
    yield victim
    os.kill(victim.process.pid, signal.SIGCONT)
    victim.process.stop()


def stopping(named, pid, then):
    """The tensors, with `pid` stopped after a third of them, `then` called, and a bucket that fills every socket."""
    for place, pair in enumerate(named):
        if place == len(named) // 3:
            os.kill(pid, signal.SIGSTOP)
            then()
            yield "large", torch.zeros(2**24)
        yield pair


def test_an_engine_that_hangs_ends_a_broadcast_after_the_timeout_and_the_next_one_heals_it(fleet, folder, victim):
    source = TrainerWeights(folder, "broadcast")
    source._transports["broadcast"] = BroadcastTransport(BUCKET_BYTES, timeout_s=2)

    async def tell(publisher):
        await publisher.publish()
        source.corrupt = lambda named: stopping(named, victim.engine.pid, lambda: None)
        started_at = time.monotonic()
        with pytest.raises(WeightSyncError, match="engine-0, victim did not take a bucket within 2 s"):
            await publisher.publish()
        seconds = time.monotonic() - started_at
        os.kill(victim.engine.pid, signal.SIGCONT)
        source.corrupt = lambda named: named
        await publisher.publish()
        return seconds, await lifecycle.versions([fleet.engines[0], victim.engine])

    (seconds, versions), _ = publishing([fleet.engines[0], victim.engine], fleet.router, source, tell)
    assert seconds < 15
    assert versions == {"engine-0": "2", "victim": "2"}


def test_an_engine_killed_in_the_middle_of_a_broadcast_is_named_at_once_and_its_successor_joins(fleet, folder, victim):
    source = TrainerWeights(folder, "broadcast")
    killed = victim.engine

    def kill():
        threading.Timer(0.5, os.kill, (killed.pid, signal.SIGKILL)).start()

    async def tell(publisher):
        await publisher.publish()
        source.corrupt = lambda named: stopping(named, killed.pid, kill)
        started_at = time.monotonic()
        with pytest.raises(EngineError, match=r"victim: the engine \(process \d+\) died during a weight update"):
            await publisher.publish()
        seconds = time.monotonic() - started_at
        source.corrupt = lambda named: named
        victim.process.stop()
        publisher.set_engines([fleet.engines[0], victim.start()])
        source.learn()
        await publisher.publish()
        return seconds, await lifecycle.versions(publisher.engines)

    (seconds, versions), _ = publishing([fleet.engines[0], killed], fleet.router, source, tell)
    assert seconds < 10
    assert versions == {"engine-0": "2", "victim": "2"}
    assert victim.engine.pid != killed.pid


def test_where_deaths_are_tolerated_the_others_get_the_version_and_a_restarted_engine_is_brought_up(
    fleet, folder, victim
):
    source = TrainerWeights(folder, "broadcast")
    survivor, killed = fleet.engines[0], victim.engine
    publishing([survivor, killed], fleet.router, source, lambda publisher: publisher.publish())

    def kill():
        source.corrupt = lambda named: named  # the second attempt is whole
        threading.Timer(0.5, os.kill, (killed.pid, signal.SIGKILL)).start()

    async def tell(publisher):
        source.corrupt = lambda named: stopping(named, killed.pid, kill)
        await publisher.publish()
        after_death = await workers(fleet.router), await lifecycle.versions([survivor])
        victim.process.stop()
        again = victim.start()
        publisher.set_engines([survivor, again])
        brought = await publisher.bring_up(again)
        versions = await lifecycle.versions([survivor, again])
        held = await lifecycle.checksums([survivor, again])
        source.learn()
        late = await publisher.bring_up(again)
        return after_death, brought, versions, held, late

    # The update over garbage is begun twice, and what was loaded is remembered from the first time.
    proofs = ProofPlan(starts_from_folder=True, transport="broadcast")
    (after_death, brought, versions, held, late), told = publishing(
        [survivor, killed], fleet.router, source, tell, proofs=proofs, tolerate_deaths=True
    )
    assert after_death == ([survivor.url], {"engine-0": "1"})
    assert brought is True
    assert versions == {"engine-0": "1", "victim": "1"}
    assert held["victim"] == held["engine-0"]
    assert late is False  # the trainer has learned since: the next publish brings it
    assert told == [1]


def test_where_deaths_are_tolerated_a_publish_to_nobody_still_makes_the_version(fleet, folder):
    """The engines are being started again, and are brought up with this version then."""
    source = TrainerWeights(folder)
    dead = replace(fleet.engines[0], url="http://127.0.0.1:9", engine_id="engine-9")

    async def run():
        publisher = Publisher(
            source,
            fleet.router,
            [dead],
            Placed(),
            told.append_later,
            NullTracker(),
            Waits(report_s=60, deadline_s=60, report=print),
            version=4,
            first_step=0,
            probe_interval=1,
            proofs=ProofPlan(),
            tolerate_deaths=True,
        )
        await publisher.publish()
        brought = await publisher.bring_up(fleet.engines[0])
        versions = await lifecycle.versions([fleet.engines[0]])
        await http_utils.aclose()
        return publisher.version, brought, versions

    class Told(list):
        async def append_later(self, version):
            self.append(version)

    told = Told()
    assert asyncio.run(run()) == (5, True, {"engine-0": "5"})
    assert told == [5]


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(folder, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    source = TrainerWeights(folder, "disk", blocked / "weights")
    with pytest.raises(WeightSyncError, match=r"file/weights: the weights cannot be written there(.|\n)*MiB are free"):
        asyncio.run(source.send_weights([], 1))


def test_a_disk_that_fills_up_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    source = TrainerWeights(folder, "disk", tmp_path / "weights")
    written = []

    def full(*args, **more):
        written.append(args)
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles.backends.weight_sync.disk.save_file", full)
    with pytest.raises(WeightSyncError, match=r"No space left on device(.|\n)*--update-weight-disk-dir"):
        asyncio.run(source.send_weights([], 1))
    assert [p.name for p in (tmp_path / "weights").iterdir()] == [".lock"]


def test_two_runs_do_not_share_a_folder_and_what_a_dead_run_left_is_removed(folder, tmp_path):
    weights = tmp_path / "weights"
    (weights / "weight_v000007").mkdir(parents=True)
    (weights / ".weight_v000008.partial").mkdir()
    (weights / "mine").mkdir()
    one, two = (DiskTransport(weights, folder, BUCKET_BYTES) for _ in range(2))

    def send(transport):
        return asyncio.run(transport.send([], [], version=1, expected_nbytes={}, learned=False))

    send(one)
    assert sorted(p.name for p in weights.iterdir()) == [".lock", "mine"]
    with pytest.raises(WeightSyncError, match="another run writes its weights there"):
        send(two)
    one.close()
    send(two)
    two.close()
