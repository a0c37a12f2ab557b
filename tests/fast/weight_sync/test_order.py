"""F18: an engine that flushes only when it is idle never gets weights before that, and the order of an update is kept."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from miles.backends.weight_sync.publisher import ProofPlan
from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.utils import http_utils
from tests.fast.weight_sync.support import AUTH, TOKEN, TrainerWeights, publishing, register

ABORT_S = 0.2


class BusyEngine:
    """A request runs until 0.2 s after an abort; as long as one does, a flush is refused."""

    def __init__(self, flushes=True, drops=()):
        self.flushes = flushes
        self.drops = set(drops)
        self.running = 0
        self.version = "0"
        self.story = []
        self.aborted = asyncio.Event()

    async def generate(self, request):
        self.running += 1
        await self.aborted.wait()
        await asyncio.sleep(ABORT_S)
        self.running -= 1
        self.story.append("idle")
        return web.json_response({"meta_info": {"finish_reason": {"type": "abort"}}})

    async def control(self, request):
        route = request.path.strip("/")
        self.story.append(route)
        if route in self.drops:
            self.drops.remove(route)
            request.transport.close()
        if route == "abort_request":
            self.aborted.set()
        if route == "flush_cache" and (self.running or not self.flushes):
            return web.json_response({"error": {"message": f"{self.running} requests run"}}, status=400)
        if route.startswith("update_weights"):
            assert self.running == 0
            self.version = (await request.json())["weight_version"] or self.version
        return web.json_response({"success": True, "weight_version": self.version})

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health", self.control)
        app.router.add_get("/model_info", self.control)
        app.router.add_post("/{route}", self.control)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        yield EngineEndpoint(url=f"http://127.0.0.1:{port}", engine_id="busy", pid=0, token=TOKEN)
        await runner.cleanup()


def update(fleet, folder, **behaviour):
    """Publish to a busy engine with one request in flight; returns its story, the request's answer and any error."""
    source = TrainerWeights(folder)

    async def tell(publisher):
        busy = BusyEngine(**behaviour)
        async with busy.serving() as engine:
            await register(engine, fleet.router)
            publisher.set_engines([engine])
            body = {"input_ids": [2], "sampling_params": {"max_new_tokens": 9}}
            request = asyncio.create_task(http_utils.post(f"{fleet.router.url}/generate", body))
            while not busy.running:
                await asyncio.sleep(0.01)
            error = None
            try:
                await publisher.publish()
            except EngineError as refused:
                error = refused
            answer = await request
            state = await http_utils.get(f"{fleet.router.url}/list_workers", headers=AUTH)
        return [s for s in busy.story if s != "health"], answer, error, state

    return publishing([], fleet.router, source, tell, proofs=ProofPlan(verify=False))[0]


def test_requests_end_before_the_flush_and_the_flush_before_the_weights(fleet, folder):
    story, answer, error, state = update(fleet, folder)
    assert error is None
    updates = story.count("update_weights_from_tensor")
    assert updates > 1
    assert story == ["abort_request", "idle", "flush_cache", *["update_weights_from_tensor"] * updates, "model_info"]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert state["held"] is False


def test_a_call_whose_connection_breaks_is_made_again_where_twice_does_nothing_more(fleet, folder):
    story, _, error, state = update(fleet, folder, drops=["abort_request", "flush_cache"])
    assert error is None
    assert story.count("abort_request") == story.count("flush_cache") == 2
    assert (state["held"], len(state["urls"])) == (False, 1)


def test_weights_whose_answer_was_lost_are_not_sent_again_and_the_engine_leaves(fleet, folder):
    story, _, error, state = update(fleet, folder, drops=["update_weights_from_tensor"])
    assert "update_weights_from_tensor" in str(error)
    assert story.count("update_weights_from_tensor") == 1
    assert (state["held"], state["urls"]) == (False, [])


def test_an_engine_that_refuses_to_flush_gets_no_weights_and_dispatch_goes_on_without_it(fleet, folder):
    story, _, error, state = update(fleet, folder, flushes=False)
    assert "flush_cache answered 400" in str(error)
    assert story == ["abort_request", "idle", "flush_cache"]
    assert (state["held"], state["urls"]) == (False, [])


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_an_engine_that_refuses_an_update_is_told_apart_and_nothing_waits(fleet, folder, tmp_path, transport):
    """An engine of another make, which answers 404 to the routes of a transport."""
    source = TrainerWeights(folder, transport, tmp_path / "weights")

    async def tell(publisher):
        app = web.Application()
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        engine = EngineEndpoint(url=url, engine_id="other", pid=0, token=TOKEN, log_path="other.log")
        with pytest.raises(EngineError, match="answered 404") as raised:
            await asyncio.wait_for(source.send_weights([engine], 1), 10)
        await runner.cleanup()
        return raised.value.__notes__

    notes, _ = publishing([], fleet.router, source, tell)
    assert notes == ["the answer is of other, log: other.log"]
