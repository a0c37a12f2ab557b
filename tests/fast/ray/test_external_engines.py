"""Runs that attach to engines which somebody else started, as real processes."""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from miles.core.run_facts import EngineEndpoint
from miles.errors import EngineError
from miles.ray.engine_hosts import EngineGoneError, ExternalEngine, ExternalEnginesPlan
from miles.utils import http_utils
from miles.utils.engine_facts import ExpectedServer, differences, read_facts
from miles.utils.process import ServerProcess
from tests.ci.register import register_cpu_ci
from tests.fast.ray.conftest import ROOT, TrainProcess, metrics

register_cpu_ci(est_time=25, suite="stage-a-cpu")
register_cpu_ci(est_time=45, suite="stage-b-cpu")


class Servers:
    """Torch engines that a user started."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model, self._logs = model, logs
        self.running: list[ServerProcess] = []

    def start(self, *flags: str, port: int = 0) -> str:
        """The address of one, once it serves."""
        return self.addresses([self.begin(*flags, port=port)])[0]

    def addresses(self, begun: list[ServerProcess]) -> list[str]:
        return [f"127.0.0.1:{server.wait_ready(60)['port']}" for server in begun]

    def begin(self, *flags: str, port: int = 0) -> ServerProcess:
        command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", str(self._model)]
        command += ["--threads", "1", "--port", str(port), *flags]
        name = f"server-{len(self.running)}"
        server = ServerProcess(name, command, self._logs / f"{name}.log", env={"PYTHONPATH": str(ROOT)})
        self.running.append(server)
        return server

    def stop(self) -> None:
        for server in self.running:
            server.stop(grace_s=0.1)


@pytest.fixture
def servers(task, tmp_path):
    started = Servers(task / "model", tmp_path / "servers")
    yield started
    started.stop()


def ask(address: str, route: str, body: dict | None = None, key: str = "") -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}/{route}", data, headers), timeout=20) as got:
        return json.loads(got.read())


def attached(*addresses: str) -> list[str]:
    return ["--rm-type", "math", "--rollout-external", "--rollout-external-engine-addrs", *addresses]


def generate(address: str) -> dict:
    return ask(address, "generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}})


BROADCAST = ["--update-weight-transfer-mode", "broadcast"]


@pytest.mark.parametrize("transport", [[], pytest.param(BROADCAST, marks=pytest.mark.slow)], ids=["disk", "broadcast"])
def test_a_run_trains_with_engines_that_go_on_when_it_has_ended(servers, flags, tmp_path, transport, monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_SERVERS", "sesame-4711")
    addresses = servers.addresses([servers.begin("--api-key", "sesame-4711") for _ in range(2)])
    key = ["--rollout-external-admin-key-env", "KEY_OF_THE_SERVERS"]
    proofs = ["--weights.reload-interval", "2"]
    ended = TrainProcess(*flags, *attached(*addresses), *transport, *key, *proofs).end()
    assert (ended.status, ended.left_behind) == (0, []), ended.err
    versions = [
        row["rollout/published_version"] for row in metrics(tmp_path / "run") if "rollout/published_version" in row
    ]
    held = [
        ask(address, "weights_checker", {"action": "checksum"}, "sesame-4711")["checksums"] for address in addresses
    ]
    assert held[0] == held[1]
    for address in addresses:
        assert generate(address)["meta_info"]["weight_version"] == str(int(max(versions)))
        assert not ask(address, "server_info")["paused"]
    files = [f for f in (tmp_path / "run").rglob("*") if f.suffix in (".log", ".yaml", ".jsonl", ".json")]
    said = "".join(f.read_text(errors="replace") for f in files)
    assert "sesame-4711" not in said + ended.out + ended.err


def expected(model: Path, **other) -> ExpectedServer:
    usual = {"kind": "auto", "dtype": "float32", "tp": 1, "context_length": 64, "deterministic": False}
    return ExpectedServer(model_folder=str(model), **{**usual, **other})


def host(model: Path, address: str, *, others: bool = False, patience_s: float = 30.0, **other) -> ExternalEngine:
    plan = ExternalEnginesPlan(
        addresses=(address,), token="", expected=expected(model, **other), return_timeout_s=patience_s
    )
    return ExternalEngine(plan, 0, lambda: others)


def run(coroutine):
    async def go():
        try:
            return await coroutine
        finally:
            await http_utils.aclose()

    return asyncio.run(go())


def test_a_server_says_what_it_is(servers, task):
    facts = read_facts(servers.start("--dtype", "bfloat16", "--context-length", "48"), "")
    assert (facts.kind, facts.tp, facts.dp, facts.dtype, facts.context_length) == ("torch", 1, 1, "bfloat16", 48)
    assert facts.pid == servers.running[0].pid
    found = list(differences(facts, expected(task / "model", kind="sglang", tp=2, deterministic=True)))
    assert [one.problem for one in found] == [
        "is torch, and --engine-backend is sglang",
        "computes in bfloat16, and the run expects float32",
        "shares its model among 1 processes, and the run expects 2",
        "takes requests of 48 tokens, and the run's may have 64",
        "does not decode deterministically, and the run has --deterministic-mode",
    ]
    assert found[3].fix == "--rollout-max-context-len 48, or start it with --context-length 64"


def test_a_server_left_paused_with_other_weights_serves_the_folders_again(servers, task):
    address = servers.start()
    before = ask(address, "weights_checker", {"action": "checksum"})
    ask(address, "weights_checker", {"action": "reset_tensors"})
    ask(address, "update_weight_version", {"new_version": "7"})
    ask(address, "pause_generation", {"mode": "abort"})
    endpoint = run(host(task / "model", address).launch())
    assert (endpoint.url, endpoint.kind, endpoint.attachment) == (f"http://{address}", "torch", 1)
    assert ask(address, "weights_checker", {"action": "checksum"}) == before
    assert generate(address)["meta_info"]["weight_version"] == "0"


def test_a_server_that_ends_is_told_and_attached_to_when_somebody_starts_it_again(servers, task):
    address = servers.start()

    async def story() -> tuple[EngineError, EngineEndpoint]:
        engine = host(task / "model", address)
        await engine.launch()
        death = asyncio.ensure_future(engine.death())
        await asyncio.sleep(0.2)
        servers.running[0]._process.send_signal(signal.SIGKILL)
        error = await asyncio.wait_for(death, 5)
        again = asyncio.ensure_future(engine.launch())
        await asyncio.to_thread(servers.start, port=int(address.rpartition(":")[2]))
        return error, await asyncio.wait_for(again, 20)

    error, back = run(story())
    assert f"the server at {address} has ended or closed its connection" in str(error)
    assert "start it again there" in str(error)
    assert back.attachment == 2


def test_without_other_engines_the_wait_for_a_server_has_an_end_with_its_address(servers, task):
    address = servers.start()

    async def story():
        engine = host(task / "model", address, patience_s=0.2)
        await engine.launch()
        await asyncio.to_thread(servers.stop)
        await engine.launch()

    with pytest.raises(
        EngineGoneError, match=rf"no engine is left, and the server at {address} was not back after 0 s"
    ):
        run(story())


def test_a_server_that_hangs_is_given_up_until_it_answers(servers, task):
    address = servers.start()

    async def story() -> EngineError:
        engine = host(task / "model", address)
        await engine.launch()
        death = asyncio.ensure_future(engine.death())
        await asyncio.sleep(0.1)
        await engine.kill("failed 3 health checks, no answer")
        return await asyncio.wait_for(death, 5)

    assert f"the server at {address} failed 3 health checks" in str(run(story()))
    assert servers.running[0].exit_code() is None


def test_an_idle_connection_to_a_server_stays_open(servers, task):
    address = servers.start()

    async def story() -> bool:
        engine = host(task / "model", address)
        await engine.launch()
        death = asyncio.ensure_future(engine.death())
        await asyncio.sleep(6.5)  # longer than uvicorn keeps one alive on which a request was made
        alive = not death.done()
        death.cancel()
        await asyncio.gather(death, return_exceptions=True)
        return alive

    assert run(story())


def test_a_run_whose_server_is_dead_ends_within_seconds_and_starts_nothing(flags, tmp_path):
    began = time.monotonic()
    ended = TrainProcess(*flags, *attached("127.0.0.1:9")).end()
    assert ended.status == 2
    assert "no server answers at 127.0.0.1:9 ([Errno 111] Connection refused)" in ended.err
    assert "start the server, or leave 127.0.0.1:9 out" in ended.err
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_run_goes_on_without_a_server_and_with_it_once_it_is_back(servers, flags, tmp_path, monkeypatch):
    pause = tmp_path / "pause"
    monkeypatch.setenv("PAUSE_FILE", str(pause))
    first, second = servers.addresses([servers.begin(), servers.begin()])
    reward = ["--custom-rm-path", f"{__name__}.reward_after_the_pause", "--num-rollout", "4"]
    train = TrainProcess(*flags, *attached(first, second)[2:], *reward)
    events = tmp_path / "run" / "events.jsonl"
    wait_for(train, events, '"phase": "train"', '"step": 1')
    servers.running[1]._process.send_signal(signal.SIGKILL)
    wait_for(train, events, '"engine died"', '"engine-1"')
    pause.touch()
    servers.start(port=int(second.rpartition(":")[2]))
    wait_for(train, events, '"engine restarted"', '"engine-1"')
    pause.unlink()
    ended = train.end()
    assert (ended.status, ended.left_behind) == (0, []), ended.err
    assert f"engine-1 is lost until somebody starts it again: the server at {second} has ended" in ended.out
    held = [ask(address, "weights_checker", {"action": "checksum"})["checksums"] for address in (first, second)]
    assert held[0] == held[1]
    assert {generate(address)["meta_info"]["weight_version"] for address in (first, second)} == {"5"}


async def reward_after_the_pause(args, sample, **kwargs):
    await asyncio.sleep(0.5)
    while Path(os.environ["PAUSE_FILE"]).exists():
        await asyncio.sleep(0.1)
    return sum(c.isdigit() for c in sample.response) / 6


def wait_for(train: TrainProcess, events: Path, *words: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = events.read_text().splitlines() if events.exists() else []
        if any(all(word in line for word in words) for line in lines):
            return
        assert train.process.poll() is None, train.end().err
        time.sleep(0.05)
    raise AssertionError(f"the run never told {words}")
