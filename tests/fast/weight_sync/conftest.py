"""One model folder, two engines and a router for all tests of this room."""

import sys
from dataclasses import dataclass

import pytest
import torch

from miles.core.run_facts import EngineEndpoint, RouterEndpoint
from miles.utils.process import ServerProcess
from tests.fast.torch_engine.support import make_model
from tests.fast.weight_sync.support import TOKEN, endpoint, start_engine

torch.set_num_threads(1)


@dataclass
class Fleet:
    engines: list[EngineEndpoint]
    router: RouterEndpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def fleet(folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    command = [sys.executable, "-m", "miles.router", "--health-check-interval", "1000", "--api-key", TOKEN]
    router = ServerProcess("router", [*command, "--exit-on-stdin-close"], logs / "router")
    engines = [start_engine(f"engine-{n}", folder, logs / f"engine-{n}") for n in range(2)]
    try:
        endpoints = [endpoint(engine) for engine in engines]
        url = f"http://127.0.0.1:{router.wait_ready(120)['port']}"
        yield Fleet(endpoints, RouterEndpoint(url=url, pid=router.pid, token=TOKEN))
    finally:
        for process in (*engines, router):
            process.stop()
