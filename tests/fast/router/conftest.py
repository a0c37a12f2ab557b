"""Fixtures: one shared router process, workers that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from router_servers import Behaviour, RouterProcess, Worker, answer_ok

from miles.utils.http_utils import bind_socket


def _run(log_path: Path, *flags: str) -> Iterator[RouterProcess]:
    router = RouterProcess(log_path, *flags)
    yield router
    router.pool.shutdown(cancel_futures=True)
    router.process.stop()


@pytest.fixture(scope="session")
def _shared_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    yield from _run(tmp_path_factory.mktemp("router") / "router.log")


@pytest.fixture(scope="session")
def _shared_patient_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    flags = ("--failure-threshold", "1000000", "--health-check-interval", "1000")
    yield from _run(tmp_path_factory.mktemp("router") / "router.log", *flags)


@pytest.fixture
def router(_shared_router: RouterProcess) -> Iterator[RouterProcess]:
    _shared_router.reset()
    yield _shared_router
    _shared_router.reset()


@pytest.fixture
def patient_router(_shared_patient_router: RouterProcess) -> Iterator[RouterProcess]:
    """One that puts no worker into quarantine."""
    _shared_patient_router.reset()
    yield _shared_patient_router
    _shared_patient_router.reset()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(name: str = "w", behaviour: Behaviour = answer_ok, **options: Any) -> Worker:
        made.append(Worker(name, behaviour, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


@pytest.fixture
def closed_port() -> int:
    sock = bind_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    return port
