import http.client
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.server import create_app
from miles.backends.torch_engine.settings import parse_settings
from miles.errors import EngineError
from miles.utils.process import ServerProcess
from tests.fast.torch_engine.support import Client, request, running_engine

COMMAND = [sys.executable, "-m", "miles.backends.torch_engine"]


@contextmanager
def served(engine: Engine) -> Iterator[Client]:
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(engine), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield Client(f"http://127.0.0.1:{sock.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def test_the_process_ends_when_its_control_pipe_closes(model_folder: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "--model-path", str(model_folder), "--threads", "1", "--exit-on-stdin-close"]
    process = ServerProcess("torch-engine", command, tmp_path / "engine.log")
    facts = process.wait_ready(120)
    assert facts["pid"] == process.pid
    connection = http.client.HTTPConnection("127.0.0.1", facts["port"], timeout=10)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    assert process._process.stdin is not None
    process._process.stdin.close()
    assert process._process.wait(timeout=10) == 0


def test_a_port_in_use_is_reported_instead_of_a_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [*COMMAND, "--model-path", str(tmp_path), "--port", str(taken.getsockname()[1])]
        process = ServerProcess("torch-engine", command, tmp_path / "engine.log")
        with pytest.raises(EngineError, match="cannot be bound: Address already in use; choose another --port"):
            process.wait_ready(60)


def test_a_folder_that_cannot_be_served_is_reported_instead_of_a_port(tmp_path: Path) -> None:
    process = ServerProcess("torch-engine", [*COMMAND, "--model-path", str(tmp_path / "no")], tmp_path / "engine.log")
    with pytest.raises(EngineError, match="no does not exist"):
        process.wait_ready(120)


def test_a_crash_of_the_loop_answers_everyone_and_shows_in_health(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    with running_engine(model_folder, max_running_requests=2) as engine, served(engine) as client:
        real = engine.decoder.decode

        def crash_later(*values: Any) -> Any:
            while engine.num_running + engine.num_waiting < 5:  # none may be finished before the last has arrived
                time.sleep(0.001)
            if engine.num_running == 2 and engine.num_waiting and engine.counters.decode_steps > 20:
                raise RuntimeError("the roof fell in")
            return real(*values)

        monkeypatch.setattr(engine.decoder, "decode", crash_later)
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda _: client.post("/generate", body), range(5)))
        for status, answer in [*answers, client.post("/generate", body)]:
            assert status == 500
            assert "the roof fell in" in answer["error"]["message"]
        for path in ("/health", "/health_generate"):
            status, answer = client.get(path)
            assert status == 503
            assert "the roof fell in" in answer["reason"]
        assert client.post("/flush_cache")[0] == 500
        assert client.get("/server_info")[0] == 200


def test_a_stuck_step_shows_in_health(model_folder: Path) -> None:
    release = threading.Event()
    with running_engine(model_folder, stuck_after_s=0.05) as engine, served(engine) as client:
        stuck = engine.call(release.wait)
        deadline = time.monotonic() + 5
        while client.get("/health")[0] == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        status, answer = client.get("/health")
        release.set()
        stuck.result()
        assert status == 503
        assert "in one step for" in answer["reason"]
        while client.get("/health")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.get("/health")[0] == 200


def test_a_call_that_is_cancelled_before_its_turn_is_skipped(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        release = threading.Event()
        ran: list[str] = []
        engine.call(release.wait)
        cancelled = engine.call(lambda: ran.append("cancelled"))
        assert cancelled.cancel()
        kept = engine.call(lambda: ran.append("kept"))
        release.set()
        kept.result(5)
        assert ran == ["kept"]
        assert engine.unhealthy() is None


def test_a_stopped_engine_answers_running_requests_and_refuses_new_ones(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        running = request([3, 4], 250)
        waiter = threading.Thread(target=engine.generate, args=([running],))
        waiter.start()
        while not engine.num_running:
            time.sleep(0.001)
        engine.stop()
        waiter.join(5)
        assert running.finish_reason == {"type": "abort", "message": "the engine was stopped"}
        with pytest.raises(EngineError, match="the engine was stopped"):
            engine.submit(request([3], 1))
        with pytest.raises(EngineError, match="the engine was stopped"):
            engine.call(engine.flush).result(5)


def test_the_command_line_fills_both_settings() -> None:
    engine, server = parse_settings(
        ["--model-path", "m", "--port", "81", "--threads", "3", "--api-key", "k", "--context-length", "9"]
    )
    assert (engine.model_path, engine.threads, engine.context_length, engine.max_running_requests) == ("m", 3, 9, 256)
    assert (server.port, server.api_key, server.exit_on_stdin_close) == (81, "k", False)


@pytest.mark.parametrize("argv", [[], ["--model-path", "m", "--threads", "0"], ["--model-path", "m", "--model", "x"]])
def test_a_wrong_command_line_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(argv)
    assert "usage" in capsys.readouterr().err


def test_no_thread_of_an_engine_outlives_it(model_folder: Path) -> None:
    def engine_threads() -> int:
        return sum(thread.name == "torch-engine" for thread in threading.enumerate())

    with running_engine(model_folder):
        assert engine_threads() == 1
    assert engine_threads() == 0
