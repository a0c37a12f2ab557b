from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from router_servers import RouterProcess, until

from miles.errors import EngineError
from miles.router.__main__ import parse
from miles.router.router import RouterSettings
from miles.utils.http_utils import bind_socket
from miles.utils.process import TOKEN_VARIABLE


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/add_worker?url=http://127.0.0.1:1"),
        ("POST", "/remove_worker?url=http://127.0.0.1:1"),
        ("GET", "/list_workers"),
        ("POST", "/hold"),
        ("POST", "/release"),
        ("GET", "/router_health"),
        ("GET", "/wait_idle"),
    ],
)
def test_control_routes_need_the_token(router, method, target) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        answer = router.call(method, target, headers=headers)
        assert answer.status == 401
        assert "Authorization: Bearer TOKEN" in answer.json["error"]
    assert router.control(method, target).status == 200


@pytest.mark.parametrize(
    ("url", "problem"),
    [("", "no url"), ("127.0.0.1", "is not an address"), ("ftp://host:1", "not the URL of a worker")],
)
def test_a_bad_worker_url_is_refused_with_the_right_form(router, url, problem) -> None:
    answer = router.control("POST", "/add_worker", {"url": url})
    assert answer.status == 400
    assert problem in answer.json["error"]
    assert "http://HOST:PORT" in answer.json["error"]
    assert not router.workers()


def test_worker_urls_have_one_spelling(router, make_worker) -> None:
    worker = make_worker()
    assert router.control("POST", "/add_worker", {"url": worker.url + "/", "id": "e0"}).json["added"]
    assert not router.control("POST", f"/add_worker?url={worker.url}").json["added"]
    assert router.control("GET", "/list_workers").json["urls"] == [worker.url]
    assert router.workers()[worker.url]["id"] == "e0"
    assert router.control("GET", "/router_health").json == {"status": "ok", "workers": 1, "healthy": 1}


def test_a_port_in_use_is_named(tmp_path) -> None:
    taken = bind_socket("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with taken, pytest.raises(EngineError, match=f"port {port} of 127.0.0.1 is in use; choose another port, or 0"):
        RouterProcess(tmp_path / "router.log", "--port", str(port))


def test_the_router_ends_when_its_owner_dies(tmp_path) -> None:
    owner = textwrap.dedent(
        """
        import sys, time
        from miles.utils.process import ServerProcess
        router = ServerProcess("router", [sys.executable, "-m", "miles.router", "--exit-on-stdin-close"], sys.argv[1])
        print(router.wait_ready(60)["pid"], flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", owner, str(tmp_path / "router.log")], stdout=subprocess.PIPE)
    assert process.stdout
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_an_owned_router_serves_on_ipv6_outlives_ctrl_c_and_ends_with_its_pipe(tmp_path, make_worker) -> None:
    router = RouterProcess(tmp_path / "router.log", "--host", "::1")
    router.add(make_worker().url)
    os.kill(router.process.pid, signal.SIGINT)  # a terminal sends it to children too; their owner ends them in order
    time.sleep(0.2)
    assert router.call("GET", "/x").status == 200
    pipe = router.process._process.stdin
    assert pipe
    pipe.close()
    until(lambda: router.process.exit_code() is not None)
    assert router.process.exit_code() == 0
    router.process.stop()


def test_the_token_may_come_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "from-env")
    assert parse([])[0].api_key == "from-env"
    assert parse(["--api-key", "given"])[0].api_key == "given"


def test_the_command_line_fills_the_settings(monkeypatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    numbers = {"port": 7, "health-check-interval": 1, "health-check-timeout": 2, "failure-threshold": 4}
    numbers |= {"max-connections": 5, "worker-wait": 6, "ready-fd": 8}
    flags = [f"--{name}={number}" for name, number in numbers.items()]
    settings, ready_fd, watch = parse(["--host=::1", "--api-key=k", "--exit-on-stdin-close", *flags])
    assert settings == RouterSettings(
        host="::1",
        port=7,
        api_key="k",
        health_check_interval_s=1,
        health_check_timeout_s=2,
        failure_threshold=4,
        max_connections=5,
        worker_wait_s=6,
    )
    assert (ready_fd, watch) == (8, True)
    assert parse([]) == (RouterSettings(), None, False)
