"""Weight updates with 64 requests in flight: real engines behind the real router, and tokens that tell their version."""

import asyncio
import copy
import os
import signal
import sys

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.weight_sync import lifecycle
from miles.backends.weight_sync.publisher import ProofPlan, Publisher
from miles.backends.weight_sync.tensor import TensorTransport
from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.core.samples import Sample
from miles.errors import EngineError, WeightSyncError
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub.single_turn import generate
from miles.rollout.inference_rollout.state import GenerateState
from miles.utils import http_utils
from miles.utils.http_utils import get, post
from miles.utils.process import ServerProcess
from miles.utils.waits import Waits
from tests.fast.rollout.support import make_args
from tests.fast.torch_engine.support import LETTERS, make_model
from tests.fast.weight_sync.support import NullTracker, Placed

torch.set_num_threads(1)
TOKEN = "t0ken"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
REQUESTS, PROMPT, LENGTH, UPDATES = 64, 8, 320, 3
MARKS = 4
"""Version v makes only tokens that are v modulo this."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, max_position_embeddings=512)


def server_process(name, module, flags, logs):
    command = [sys.executable, "-m", module, "--api-key", TOKEN, "--exit-on-stdin-close", *flags]
    return ServerProcess(name, command, logs / name)


def engine_process(name, folder, logs):
    flags = ["--model-path", str(folder), "--threads", "1", "--kv-cache-mb", "64"]
    return server_process(name, "miles.backends.torch_engine", flags, logs)


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    """A router without workers, and two engines."""
    logs = tmp_path_factory.mktemp("logs")
    processes = [
        server_process("router", "miles.router", ["--health-check-interval", "1000"], logs),
        *(engine_process(name, folder, logs) for name in ("engine-0", "engine-1")),
    ]
    try:
        router, *engines = (f"http://127.0.0.1:{p.wait_ready(120)['port']}" for p in processes)
        yield (
            RouterEndpoint(url=router, pid=processes[0].pid, token=TOKEN),
            [
                EngineEndpoint(url=url, engine_id=f"engine-{i}", pid=processes[1 + i].pid, token=TOKEN)
                for i, url in enumerate(engines)
            ],
        )
    finally:
        for process in processes:
            process.stop()


class Weights:
    """A `WeightSource` whose version v moves every parameter, and lets the model make tokens of its own class only."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.lock, self.batches_trained = asyncio.Lock(), 0
        self.during = None
        self.broken = False

    def of(self, version):
        """A model with the weights of a version."""
        model = copy.deepcopy(self.model)
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
            # Place 0 of the residual stream is the same positive number for all tokens; the head reads the class there.
            model.model.embed_tokens.weight[:, 0] = 4.0
            model.model.norm.weight[0] = 1.0
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight[0] = 0.0
                layer.mlp.down_proj.weight[0] = 0.0
            tokens = torch.arange(model.config.vocab_size)
            model.lm_head.weight[:, 0] = torch.where(tokens % MARKS == version % MARKS, 60.0, -60.0)
        return model

    async def send_weights(self, engines, version, transport=None):
        if self.during:
            await self.during(version)
        named = [(n, p.detach()) for n, p in self.of(version).named_parameters()]
        sent = [(n, p[:1]) if self.broken and n == "lm_head.weight" else (n, p) for n, p in named]
        return await TensorTransport(SharedMemoryCodec(), 16 * 1024).send(
            sent,
            list(engines),
            version=version,
            expected_nbytes={n: p.nbytes for n, p in named},
            learned=True,
        )


async def router_state(router):
    return await get(f"{router.url}/list_workers", headers=AUTH)


async def decoded(engines):
    return sum([(await get(f"{e.url}/server_info"))["counters"]["decode_tokens"] for e in engines])


def story(servers, folder, tmp_path, mode, engines, tell):
    """Run `tell(publisher, source, state)` with `engines` of the engines behind the router."""
    router, chosen = servers[0], servers[1][:engines]

    async def run():
        for engine in servers[1]:
            await post(f"{router.url}/remove_worker", {"url": engine.url}, headers=AUTH)
        for engine in chosen:
            await post(f"{router.url}/add_worker", {"url": engine.url, "id": engine.engine_id}, headers=AUTH)
        sections = {
            "model": {"hf_checkpoint": str(folder)},
            "rollout": {"max_response_len": LENGTH},
            "weights": {"mode": mode},
        }
        state = GenerateState(make_args(tmp_path, router.url, **sections))

        async def note(version):
            state.weight_version = str(version)

        source = Weights(folder)
        publisher = Publisher(
            source,
            router,
            chosen,
            Placed(),
            note,
            NullTracker(),
            Waits(report_s=60, deadline_s=60, report=print),
            version=0,
            first_step=0,
            probe_interval=0,
            proofs=ProofPlan(reload_interval=2),
            mode=mode,
        )
        try:
            return await tell(publisher, source, state)
        finally:
            await state.close()
            await http_utils.aclose()

    return asyncio.run(run())


def start_requests(state):
    tasks = []
    for index in range(REQUESTS):
        tokens = [2 + (index // 4 + place) % 40 for place in range(PROMPT)]
        sample = Sample(group_index=index // 4, index=index, tokens=tokens)
        params = {**state.params_for(sample), "ignore_eos": True}
        tasks.append(asyncio.create_task(generate(GenerateFnInput(state, sample, params))))
    return tasks


async def generate_through_updates(publisher, source, state, engines, router):
    """64 responses, made while `UPDATES` versions are published one after another."""
    await publisher.publish()
    held = []

    async def look(version):
        workers = await router_state(router)
        paused = [(await get(f"{e.url}/server_info"))["paused"] for e in engines]
        held.append((workers["held"], workers["in_flight"], paused))

    source.during = look
    began = [await decoded([engine]) for engine in engines]
    tasks = start_requests(state)
    spread = None
    for number in range(UPDATES):
        # Of two engines, the one that is ahead must not have ended a request, and the other must have used each version.
        share = REQUESTS / len(engines)
        before = [await decoded([engine]) for engine in engines]
        while True:
            now = [await decoded([engine]) for engine in engines]
            ahead = max(n - b for n, b in zip(now, began, strict=True))
            least = min(n - b for n, b in zip(now, before, strict=True))
            if ahead >= share * 20 * (number + 1) and least >= share:
                break
            await asyncio.sleep(0.005)
        if spread is None:
            spread = [worker["in_flight"] for worker in (await router_state(router))["workers"]]
        await publisher.publish()
        assert not any(task.done() for task in tasks)
    samples = [output.samples for output in await asyncio.gather(*tasks)]
    return samples, held, spread, [await get(f"{e.url}/server_info") for e in engines], await router_state(router)


def versions_of(sample):
    ends = [start for start, _ in sample.version_spans[1:]] + [sample.response_length]
    return [int(v) for (start, v), end in zip(sample.version_spans, ends, strict=True) for _ in range(end - start)]


def assert_log_probs_are_those_of_the_version_that_sampled(samples, source):
    ids_BT = torch.tensor([s.tokens for s in samples])
    versions_BR = torch.tensor([versions_of(s) for s in samples])
    got_BR = torch.tensor([s.rollout_log_probs for s in samples])
    for version in versions_BR.unique().tolist():
        with torch.no_grad():
            logprobs_BTV = source.of(version)(ids_BT).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        want_BR = logprobs_BTV.gather(2, ids_BT[:, PROMPT:, None]).squeeze(2)
        mine_BR = versions_BR == version
        torch.testing.assert_close(got_BR[mine_BR], want_BR[mine_BR], atol=1e-3, rtol=0)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("mode", ["drain", "in_place", "retract"])
def test_updates_under_way_lose_no_token_and_every_token_names_its_version(servers, folder, tmp_path, mode, engines):
    router, chosen = servers[0], servers[1][:engines]
    seen = {}

    async def tell(publisher, source, state):
        seen["source"] = source
        return await generate_through_updates(publisher, source, state, chosen, router)

    samples, held, spread, infos, workers = story(servers, folder, tmp_path, mode, engines, tell)
    assert spread == [REQUESTS // engines] * engines
    assert len(samples) == REQUESTS
    for sample in samples:
        sample.validate()
        assert (sample.response_length, sample.status) == (LENGTH, Sample.Status.TRUNCATED)
        assert sample.weight_versions == ["1", "2", "3", "4"]
        made = [token % MARKS for token in sample.tokens[PROMPT:]]
        assert made == [version % MARKS for version in versions_of(sample)]
        assert sample.response == "".join(LETTERS[token] for token in sample.tokens[PROMPT:])
    still_in_flight = 0 if mode == "drain" else REQUESTS
    # each second proof loads the weights another way: the engines are held and paused then as well
    assert set(map(repr, held)) == {repr((True, still_in_flight, [mode != "drain"] * engines))}
    for info in infos:
        assert info["weight_version"] == "4"
        assert (info["paused"], info["num_running"], info["num_waiting"]) == (False, 0, 0)
    assert (workers["held"], workers["in_flight"], len(workers["urls"])) == (False, 0, engines)
    if mode != "in_place":  # whose KV is of several versions
        assert_log_probs_are_those_of_the_version_that_sampled(samples, seen["source"])


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_after_a_failed_update_no_request_goes_on_on_half_weights(servers, folder, tmp_path, mode):
    router, engines = servers
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }

    async def tell(publisher, source, state):
        await publisher.publish()
        began = await decoded(engines)
        requests = [asyncio.create_task(post(f"{router.url}/generate", body)) for _ in range(8)]
        while await decoded(engines) - began < 8 * 20:
            await asyncio.sleep(0.005)
        source.broken = True
        with pytest.raises(EngineError, match=r"lm_head\.weight has shape") as failure:
            await publisher.publish()
        answers = await asyncio.wait_for(asyncio.gather(*requests), 10)
        state_after = await router_state(router)
        infos = [await get(f"{e.url}/server_info") for e in engines]
        source.broken = False
        await publisher.publish()
        for engine in engines:
            await post(f"{router.url}/add_worker", {"url": engine.url}, headers=AUTH)
        again = await post(f"{router.url}/generate", body)
        return failure.value, answers, state_after, infos, again

    failure, answers, workers, infos, again = story(servers, folder, tmp_path, mode, 2, tell)
    assert not [note for note in getattr(failure, "__notes__", []) if note.startswith("and after this failure")]
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 400
        assert {token % MARKS for token in answer["output_ids"]} == {1}
    assert (workers["urls"], workers["held"], workers["in_flight"]) == ([], False, 0)
    assert all(info["paused"] and info["num_running"] == info["num_waiting"] == 0 for info in infos)
    assert {token % MARKS for token in again["output_ids"]} == {2}
    assert again["meta_info"]["completion_tokens"] == 400


def test_streams_of_an_engine_that_is_killed_go_on_elsewhere_from_their_tokens(servers, folder, tmp_path):
    router, (first, second) = servers
    half = REQUESTS * LENGTH // 2
    process = engine_process("engine-2", folder, tmp_path)
    try:
        doomed = EngineEndpoint(
            url=f"http://127.0.0.1:{process.wait_ready(120)['port']}",
            engine_id="engine-2",
            pid=process.pid,
            token=TOKEN,
        )

        async def tell(publisher, source, state):
            await publisher.publish()
            began = await decoded([first])
            tasks = start_requests(state)
            while await decoded([doomed]) < half / 2:
                await asyncio.sleep(0.005)
            os.kill(process.pid, signal.SIGKILL)
            samples = [output.samples for output in await asyncio.gather(*tasks)]
            return samples, await decoded([first]) - began, source

        chosen = (router, [first, doomed, second])
        samples, made_by_first, source = story(chosen, folder, tmp_path, "in_place", 2, tell)
    finally:
        process.stop()
    assert all((s.response_length, s.weight_versions) == (LENGTH, ["1"]) for s in samples)
    # the half that was the dead engine's own is not made again as far as it had been shown
    assert made_by_first - half < 0.8 * half
    assert_log_probs_are_those_of_the_version_that_sampled(samples, source)


@pytest.mark.parametrize(("info", "refused"), [({}, True), ({"disable_radix_cache": True}, False)])
def test_retract_is_refused_where_requests_would_resume_on_old_kv(info, refused):
    called = []

    async def answer(request):
        called.append(request.path)
        return web.json_response(info)

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{any:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        engine = EngineEndpoint(url=url, engine_id="engine-7", pid=0, token=TOKEN)
        router = RouterEndpoint(url=url, pid=0, token=TOKEN)

        async def send():
            raise WeightSyncError("sent")

        try:
            waits = Waits(report_s=60, deadline_s=60, report=print)
            await lifecycle.update("retract", router, [engine], send, None, waits)
        finally:
            await http_utils.aclose()
            await runner.cleanup()

    with pytest.raises(WeightSyncError, match="engine-7 would resume requests on cached KV" if refused else "^sent$"):
        asyncio.run(run())
    assert called[0] == "/server_info"
    assert ("/hold" in called) is not refused
