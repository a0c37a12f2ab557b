"""The clock of the wall may jump: nothing that lasts, waits or expires is measured with it."""

import ast
import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from miles.errors import EngineError, StalledError
from miles.utils import http_utils
from miles.utils.process import ServerProcess
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.tracker import RunTracker
from miles.utils.waits import Waits

ROOT = Path(__file__).parents[3]
# What gives a moment that could be subtracted; `time.strftime` gives only text.
WALL = {
    "time": {"time", "time_ns", "clock_gettime", "clock_gettime_ns"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
# Where the wall's time is what is wanted: moments that are shown, never subtracted.
ALLOWED = {
    ("miles/backends/torch_engine/chat.py", "time.time"): "when an answer was made, a field of the OpenAI API",
    (
        "miles/backends/torch_engine/payload.py",
        "time.time",
    ): "age of a file; a lock decides, the age only spares a try",
    ("miles/ray/wait_graph.py", "time.time"): "age of a log, as the file system dates it; shown, and decides nothing",
    ("miles/utils/tracking_utils/events.py", "time.time"): "when an event was",
    ("miles/utils/tracking_utils/tensorboard_writer.py", "time.time"): "when a value was written, and a file name",
    ("miles/utils/tracking_utils/tracker.py", "time.time"): "when a row was written",
}


def wall_clock_uses(source: str) -> set[str]:
    """Functions that read the wall's clock, by module or class: `time.time`, `datetime.now`; aliases are followed."""
    tree, known, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {name.asname or name.name: name.name for name in node.names if name.name in ("time", "datetime")}
        elif isinstance(node, ast.ImportFrom) and node.module == "datetime":
            known |= {name.asname or name.name: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{name.name}" for name in node.names if name.name in WALL["time"]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value = node.value
            owner = value.attr if isinstance(value, ast.Attribute) else known.get(getattr(value, "id", ""), "")
            if node.attr in WALL.get(owner, ()):
                found.add(f"{owner}.{node.attr}")
    return found


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import time\nt = time.time() + 5", {"time.time"}),
        ("import time as clock\nclock.time_ns()", {"time.time_ns"}),
        ("from time import time as now", {"time.time"}),
        ("import datetime\ndatetime.datetime.now()", {"datetime.now"}),
        ("from datetime import datetime as d, date\nd.utcnow(); date.today()", {"datetime.utcnow", "date.today"}),
        ("import time\nstart = time.time\n", {"time.time"}),
        ("import time\nfrom datetime import timedelta\ntime.monotonic(); self.time.time_left; timedelta(1)", set()),
    ],
)
def test_what_reads_the_walls_clock_is_found(source, uses):
    assert wall_clock_uses(source) == uses


def test_nothing_measures_with_the_walls_clock():
    files = [*(ROOT / "miles").rglob("*.py"), ROOT / "train.py"]
    found = {(str(f.relative_to(ROOT)), use) for f in files for use in wall_clock_uses(f.read_text(encoding="utf-8"))}
    assert found == set(ALLOWED), "measure with time.monotonic(), or say here why the wall's time is wanted"


@pytest.fixture(params=[3600.0, -3600.0], ids=["forwards", "backwards"])
def jumping(request, monkeypatch):
    """Every look at the wall's clock finds it an hour further on, or back."""
    real, looks = time.time, 0

    def jumped():
        nonlocal looks
        looks += 1
        return real() + request.param * looks

    monkeypatch.setattr(time, "time", jumped)
    assert abs(time.time() - time.time()) > 3000


def lasted(started: float, least: float, most: float) -> bool:
    return least <= time.monotonic() - started < most


@pytest.mark.timeout(30)
def test_a_jump_neither_ends_nor_prolongs_a_wait(jumping):
    told = []
    waits = Waits(report_s=0.1, deadline_s=0.35, report=told.append)
    started = time.monotonic()
    with pytest.raises(StalledError):
        asyncio.run(waits.on("engine", "start", asyncio.sleep(60)))
    assert lasted(started, 0.35, 5)
    assert 1 <= len(told) <= 3
    assert asyncio.run(waits.on("engine", "start", asyncio.sleep(0.2, "up"))) == "up"


@pytest.mark.timeout(30)
def test_a_jump_neither_ends_nor_prolongs_the_start_and_end_of_a_server(jumping, tmp_path):
    silent = ServerProcess("engine", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    started = time.monotonic()
    with pytest.raises(EngineError, match="not ready after 1 s"):
        silent.wait_ready(0.7)
    assert lasted(started, 0.7, 4)

    deaf = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += "os.write(int(sys.argv[-1]), b'{}\\n'); time.sleep(60)"
    server = ServerProcess("engine", [sys.executable, "-c", deaf], tmp_path / "log")
    server.wait_ready(20)
    started = time.monotonic()
    server.stop(grace_s=0.5)
    assert lasted(started, 0.5, 4)
    assert server.exit_code() == -signal.SIGKILL


@pytest.mark.timeout(30)
def test_a_jump_neither_ends_nor_prolongs_the_tries_of_a_call(jumping):
    async def call() -> None:
        sock = http_utils.bind_socket("127.0.0.1", 0)
        url = http_utils.url_of(*sock.getsockname()[:2])
        sock.close()
        for deadline_s in (0.5, 1.0):
            started = time.monotonic()
            with pytest.raises(http_utils.TransportError):
                await http_utils.post(url, {}, deadline_s=deadline_s)
            assert lasted(started, 0.1, 5)
        await http_utils.aclose()

    async def late(reader, writer):
        await asyncio.sleep(0.3)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def answered() -> None:
        sock = http_utils.bind_socket("127.0.0.1", 0)
        url = http_utils.url_of(*sock.getsockname()[:2])
        async with await asyncio.start_server(late, sock=sock):
            assert await http_utils.post(url, {}, timeout_s=5, deadline_s=5) == {}
            await http_utils.aclose()

    asyncio.run(call())
    asyncio.run(answered())


def test_a_jump_shows_in_no_duration(jumping, tmp_path, capsys):
    tracker = RunTracker(tmp_path, "t", console := Console(), use_tensorboard=False)
    console.start(range(3))
    for step in range(3):
        tracker.log(step, {"perf/train_time": 0.1})
    tracker.close()
    assert all("left 0:00" in line for line in capsys.readouterr().out.splitlines())
    steps = [line.partition('"perf/step_time": ')[2] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [float(text.rstrip("}")) < 5 for text in steps if text] == [True, True]
