import asyncio
import contextvars
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from miles.utils import heartbeat
from miles.utils.heartbeat import Heartbeat
from miles.utils.signals import SignalThread
from miles.utils.task_stacks import task_stacks
from miles.utils.waits import OpenWaits


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "STUCK_S", 0.1)


def last(folder: Path, role: str) -> dict:
    return json.loads((folder / f"{role}.json").read_text())


def until(condition, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def enter(wait):
    """As a task of its own would."""
    contextvars.copy_context().run(wait.__enter__)


def sleep_in_the_loop(until_then: threading.Event) -> None:
    until_then.wait(5)


def test_a_blocked_event_loop_is_told_from_a_free_one_with_the_place_where_it_is(tmp_path, quick):
    go_on = threading.Event()

    async def story():
        beat = Heartbeat("manager", tmp_path, open_waits=OpenWaits(), beat_s=0.02).start()
        await asyncio.sleep(0.3)
        free = last(tmp_path, "manager")

        def look():
            until(lambda: last(tmp_path, "manager")["loop_stuck_s"] is not None)
            seen.append(last(tmp_path, "manager"))
            go_on.set()

        seen = []
        threading.Thread(target=look).start()
        sleep_in_the_loop(go_on)
        while last(tmp_path, "manager")["loop_stuck_s"] is not None:  # it recovers, or this test runs into its limit
            await asyncio.sleep(0.02)
        beat.stop()
        return free, seen[0]

    free, stuck = asyncio.run(asyncio.wait_for(story(), 20))
    assert free["loop_stuck_s"] is None
    assert stuck["loop_stuck_s"] > 0.1
    assert any("in sleep_in_the_loop" in frame for frame in stuck["at"])
    assert free["pid"] == os.getpid()


def test_a_beat_holds_the_waits_grouped_with_the_oldest_first(tmp_path):
    waits = OpenWaits()
    beat = Heartbeat("manager", tmp_path, open_waits=waits)
    enter(waits.on("my.reward", "reward", group=1, sample=8))
    enter(waits.on("router", "generate", request="1-9-ab"))
    for sample in range(20):
        enter(waits.on("my.reward", "reward", group=2, sample=sample))
    beat.beat()
    rewards, requests = last(tmp_path, "manager")["waits"]
    assert (rewards["owner"], rewards["count"], rewards["subjects"][0]) == ("my.reward", 21, "group 1 sample 8")
    assert len(rewards["subjects"]) == 8
    assert requests["subjects"] == ["1-9-ab"]
    assert rewards["since"] <= requests["since"] <= time.monotonic()


def test_a_disk_that_takes_nothing_is_told_once_and_stops_nothing(tmp_path, caplog):
    beat = Heartbeat("manager", tmp_path / "not-there", open_waits=OpenWaits())
    beat.beat()
    beat.beat()
    assert caplog.text.count("cannot be written") == 1


def test_a_child_writes_beside_its_owner_and_answers_the_signal_for_its_stacks(tmp_path):
    heartbeat.start("owner", tmp_path)
    environment = {**os.environ, **heartbeat.environment_of("engine-0")}
    code = (
        "import sys, time\nfrom miles.utils import heartbeat\nheartbeat.start_as_child()\n"
        "def work_for_long():\n    print('ready', flush=True)\n    time.sleep(30)\nwork_for_long()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        child.stdout.readline()
        assert {b["role"]: b["pid"] for b in heartbeat.read(tmp_path)} == {"owner": os.getpid(), "engine-0": child.pid}
        os.kill(child.pid, signal.SIGUSR2)
        until(lambda: "work_for_long" in (tmp_path / "engine-0.stacks").read_text())
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
        heartbeat.stop()
    assert heartbeat.environment_of("engine-0") == {}


def test_a_thousand_waits_cost_less_than_half_a_percent_of_a_core(tmp_path):
    waits = OpenWaits()
    for sample in range(1000):
        enter(waits.on("my.reward", "reward", group=sample // 8, sample=sample))
    beat = Heartbeat("manager", tmp_path, open_waits=waits)
    costs = []
    for _ in range(5):
        began = time.thread_time()
        beat.beat()
        costs.append(time.thread_time() - began)
    assert min(costs) < 0.005 * heartbeat.BEAT_S


def test_signals_are_answered_while_the_main_thread_and_its_loop_are_blocked():
    answered = threading.Event()

    async def story():
        with SignalThread() as signals:
            signals.answer({signal.SIGUSR1: answered.set})
            os.kill(os.getpid(), signal.SIGUSR1)
            return answered.wait(2)  # blocks the loop

    before = signal.getsignal(signal.SIGUSR1)
    assert asyncio.run(story())
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_stacks_of_tasks_show_what_each_awaits_and_equal_ones_once():
    async def waits_for_a_tool():
        await asyncio.sleep(60)

    async def generate():
        await waits_for_a_tool()

    async def story():
        tasks = [asyncio.create_task(generate(), name=f"group {n}") for n in range(3)]
        await asyncio.sleep(0)
        text = await asyncio.to_thread(task_stacks, asyncio.get_running_loop())
        for task in tasks:
            task.cancel()
        return text

    text = asyncio.run(story())
    (stack,) = [piece for piece in text.split("\n\n") if "in generate" in piece]
    assert re.match(r"Task 'group \d' and 2 more like it \(innermost first\):", stack)
    assert re.findall(r" in (\w+)$", stack, re.M) == ["sleep", "waits_for_a_tool", "generate"]


def test_the_answer_to_the_signal_ends_with_the_tasks_of_the_watched_loop(tmp_path):
    async def story():
        beat = Heartbeat("manager", tmp_path, open_waits=OpenWaits(), beat_s=0.02).start()
        os.kill(os.getpid(), signal.SIGUSR2)
        answers = tmp_path / "manager.stacks"
        while not answers.read_bytes().endswith(heartbeat.STACKS_END):
            await asyncio.sleep(0.02)
        beat.stop()
        return answers.read_text()

    text = asyncio.run(asyncio.wait_for(story(), 20))
    assert text.index("Thread 0x") < text.index("(innermost first)")
    assert text.count("-- end") == 1
