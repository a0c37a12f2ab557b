"""An engine that loads for long, or dies while it does, told by a real server process around a made-up SGLang."""

import json
import os
import sys
import time

import pytest

from miles.errors import EngineError
from miles.ray import wait_graph
from miles.ray.hang import HangExplainer
from miles.utils import heartbeat
from miles.utils.process import ServerProcess
from miles.utils.sglang_source import SUPPORTED, is_supported
from miles.utils.tracking_utils.events import EventLog
from miles.utils.waits import ITSELF, OPEN

HTTP_SERVER = """
import http.server, os, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

def launch_server(args, launch_callback):
    print("Load weight begin. avail mem=139.1 GB", flush=True)
    if "--dies" in args:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.32 GiB")
    print("\\x1b[32mCapturing batches (bs=8):  10%|#   | 1/10\\rCapturing batches (bs=4):  20%|##  | 2/10\\x1b[0m", flush=True)
    print("", flush=True)
    while not os.path.exists(args[args.index("--model-path") + 1]):
        time.sleep(0.02)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler)
    threading.Thread(target=launch_callback).start()
    server.serve_forever()
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Starts `engine-0` with the words given, after a driver's heartbeat."""
    package = tmp_path / "site" / "sglang" / "srt"
    (package / "entrypoints").mkdir(parents=True)
    for folder in (package.parent, package, package / "entrypoints"):
        (folder / "__init__.py").touch()
    (package / "entrypoints" / "http_server.py").write_text(HTTP_SERVER)
    (package / "server_args.py").write_text("def prepare_server_args(words):\n    return words\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.getcwd()}")
    started = []

    def start(*words):
        command = [sys.executable, "-m", "miles.backends.sglang_utils.serve", "--exit-on-stdin-close", *words]
        started.append(ServerProcess("engine-0", command, tmp_path / "logs" / "engine-0.log"))
        return started[0]

    with heartbeat.of_driver(tmp_path):
        yield start
        for process in started:
            process.stop()
            heartbeat.CHILDREN.pop(process.name, None)


def until(found, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline, "did not come"
        time.sleep(0.05)
    return value


def test_a_wait_for_an_engine_that_loads_names_it_with_the_last_line_of_its_log(engine, tmp_path):
    process = engine("--model-path", str(tmp_path / "loaded"))
    events = EventLog(tmp_path / "events.jsonl")
    explainer = HangExplainer(tmp_path, events)
    log = tmp_path / "logs" / "engine-0.log"
    with OPEN.on("engine-0", "start"):
        until(lambda: "Capturing" in log.read_text())
        told = until(lambda: "loads the model" in (line := explainer.long_wait("engine-0", "start")) and line)
        words = "Capturing batches (bs=4):  20%|##  | 2/10"
        assert told.startswith(f"probably: engine-0 (pid {process.pid}) loads the model, ")
        assert told.endswith(f"s ago: {words}")
        os.utime(log, (time.time() - 75, time.time() - 75))
        quiet = explainer.long_wait("engine-0", "start").splitlines()
        assert quiet[0].endswith("; its log has said nothing for 75 s and ends:")
        assert [line.strip() for line in quiet[1:]] == ["Load weight begin. avail mem=139.1 GB", words]
        assert "engine-0 (pid" in explainer.asked()
    (tmp_path / "loaded").touch()
    process.wait_ready(20.0)
    events.close()
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert any("loads the model" in event.get("probably", "") for event in found)
    beat = until(lambda: next(b for b in heartbeat.read(tmp_path / heartbeat.FOLDER) if b["role"] == "engine-0"))
    until(lambda: not json.loads((tmp_path / heartbeat.FOLDER / "engine-0.json").read_bytes())["waits"])
    assert beat["pid"] == process.pid


def test_the_chain_from_the_driver_ends_at_what_the_engine_does_itself():
    def beat(role, pid, owner, name, since, children):
        wait = {"owner": owner, "name": name, "since": since, "subjects": [], "count": 1, "within": ""}
        return {
            "role": role, "pid": pid, "written": 100.0, "loop_stuck_s": None, "blocks": False, "at": [],
            "children": children, "waits": [wait] if owner else [],
        }  # fmt: skip

    beats = [
        beat("driver", 1, "rollout manager", "start", 10.0, {}),
        beat("rollout-manager", 2, "engine-0", "start", 12.0, {}),
        beat("engine-0-actor", 3, "", "", 0.0, {"engine-0": 4}),
        beat("engine-0", 4, ITSELF, "loads the model", 25.0, {}),
    ]
    driver = wait_graph.build(beats, 100.0, lambda pid: "sleeping")
    found = wait_graph.culprit(driver, "rollout manager", "start")
    assert (found.text, found.works) == ("engine-0 (pid 4) loads the model, 75 s so far", "engine-0")
    assert wait_graph.render(driver).splitlines()[-2:] == [
        "            loads the model, 75 s so far",
        "probably: engine-0 (pid 4) loads the model, 75 s so far",
    ]


def test_an_engine_that_dies_while_it_loads_is_told_with_the_end_of_its_log(engine, tmp_path):
    with pytest.raises(EngineError) as error:
        engine("--model-path", str(tmp_path / "loaded"), "--dies").wait_ready(20.0)
    told = str(error.value)
    assert "ended before it was ready (exit code 1)" in told
    assert "Load weight begin. avail mem=139.1 GB" in told
    assert "CUDA out of memory. Tried to allocate 2.32 GiB" in told
    assert str(tmp_path / "logs" / "engine-0.log") in told


def test_the_end_of_a_log_leaves_out_lines_that_say_nothing(tmp_path):
    log = tmp_path / "engine-0.log"
    assert wait_graph.last_words(tmp_path, "engine-0") == ""
    log.write_text("=====\n\n")
    assert wait_graph.last_words(tmp_path, "engine-0") == f"; its log ({log}) is empty"
    log.write_text(f"one\n-----\n{'x' * 300}\n\n")
    assert wait_graph.log_lines(log, 5) == ["one", f"{'x' * 200} ..."]
    assert wait_graph.log_lines(log, 1) == [f"{'x' * 200} ..."]


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("0.5.17", True),
        ("0.5.17.post1", True),
        ("0.5.18rc1", True),
        ("0.5.20", True),
        ("of an unknown version", True),
        ("0.5.16", False),
        ("0.5.17rc1", False),
        ("0.6.0", False),
        ("1.0", False),
    ],
)
def test_versions_of_sglang_are_those_of_the_extra(version, works):
    assert is_supported(version) == works


def test_the_range_is_that_of_the_package(pytestconfig):
    assert f'sglang = ["sglang{SUPPORTED}"]' in (pytestconfig.rootpath / "pyproject.toml").read_text()
