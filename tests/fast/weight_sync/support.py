"""Real engines and a router to publish to, and a trainer's weights in the test's own process."""

import asyncio
import sys
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM

from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.training_utils.parity import ParityBounds
from miles.backends.weight_sync.probes import check_probes, probe_sequences, score_on_engine
from miles.backends.weight_sync.publisher import ProofPlan, Publisher
from miles.backends.weight_sync.transports import build_transport
from miles.core.run_facts import EngineEndpoint
from miles.utils import http_utils
from miles.utils.process import ServerProcess
from miles.utils.waits import Waits
from tests.fast.torch_engine.support import reference_logprobs

TOKEN = "t0ken"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
BOUNDS = ParityBounds(1e-3, 1e-2)
BUCKET_BYTES = 16 * 1024


def start_engine(name, folder, log, *flags):
    """An engine's process, not yet ready."""
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", str(folder), "--threads", "1"]
    command += ["--kv-cache-mb", "64", "--api-key", TOKEN, "--exit-on-stdin-close", *flags]
    return ServerProcess(name, command, log)


def endpoint(process):
    """The endpoint of an engine's process, once it serves."""
    url = f"http://127.0.0.1:{process.wait_ready(180)['port']}"
    return EngineEndpoint(url=url, engine_id=process.name, pid=process.pid, token=TOKEN, log_path=process.log_path)


class TrainerWeights:
    """A `WeightSource` over a model in this process, which a test may corrupt on its way out."""

    def __init__(self, folder, transport="tensor", disk_folder=None, dtype=torch.float32):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.folder, self.transport, self.disk_folder, self.dtype = folder, transport, disk_folder, dtype
        self.lock = asyncio.Lock()
        self.batches_trained = 0
        self.learned = False
        self.corrupt = lambda named: named
        self.forge = lambda sent: sent
        self.ways = []
        self._transports = {}

    def named(self):
        return [(n, p.detach().to(self.dtype)) for n, p in self.model.named_parameters()]

    def learn(self):
        with torch.no_grad():
            for _, p in self.model.named_parameters():
                p.mul_(1.01)
        self.learned = True
        self.batches_trained += 1

    def score(self, sequences, temperature):
        return [reference_logprobs(self.model, s, temperature).tolist() for s in sequences]

    def by(self, name):
        if name not in self._transports:
            self._transports[name] = build_transport(
                name,
                codec=SharedMemoryCodec(),
                bucket_bytes=BUCKET_BYTES,
                disk_folder=self.disk_folder,
                model_folder=self.folder,
            )
        return self._transports[name]

    async def send_weights(self, engines, version, transport=None):
        self.ways.append(transport or self.transport)
        sent = await self.by(self.ways[-1]).send(
            self.corrupt(self.named()),
            list(engines),
            version=version,
            expected_nbytes={n: p.nbytes for n, p in self.named()},
            learned=self.learned,
        )
        self.learned = False
        return self.forge(sent)

    async def ask_probes(self, engine):
        self.probed = await score_on_engine(engine, self.probes(), 0.7)

    async def check_probes(self, engine, version):
        return check_probes(
            engine, self.probed, self.score, self.probes(), temperature=0.7, bounds=BOUNDS, version=version
        )

    def probes(self):
        return probe_sequences(3, self.model.config.vocab_size, 64)

    def close(self):
        for transport in self._transports.values():
            transport.close()


class NullTracker:
    def log(self, step, metrics):
        pass

    def close(self):
        pass


class Placed:
    def for_rollout(self):
        return nullcontext()

    for_training = for_weight_sync = for_scoring = for_rollout


async def register(engine, router):
    await http_utils.post(f"{router.url}/add_worker", {"url": engine.url, "id": engine.engine_id}, headers=AUTH)


async def unregister(engine, router):
    await http_utils.post(f"{router.url}/remove_worker", {"url": engine.url}, headers=AUTH)


async def workers(router):
    return (await http_utils.get(f"{router.url}/list_workers", headers=AUTH))["urls"]


def publishing(engines, router, source, tell, *, probe_interval=0, proofs=None, **more):
    """Run `tell(publisher)` with the engines in the router; returns its result, and the versions that were told."""
    told = []

    async def note(version):
        told.append(version)

    async def run():
        for engine in engines:
            await register(engine, router)
        publisher = Publisher(
            source,
            router,
            engines,
            Placed(),
            note,
            NullTracker(),
            Waits(report_s=60, deadline_s=60, report=print),
            version=0,
            first_step=0,
            probe_interval=probe_interval,
            proofs=proofs or ProofPlan(transport=source.transport),
            **more,
        )
        try:
            return await tell(publisher)
        finally:
            source.close()
            for url in await workers(router):
                await http_utils.post(f"{router.url}/remove_worker", {"url": url}, headers=AUTH)
            await http_utils.aclose()

    return asyncio.run(run()), told
