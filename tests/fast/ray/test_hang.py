"""Hangs and what is told of them: the graph from heartbeats, and whole runs that hang on purpose."""

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from miles.ray import stacks, wait_graph
from miles.ray.hang import HangExplainer
from miles.utils import heartbeat
from miles.utils.tracking_utils.events import EventLog
from miles.utils.waits import OPEN
from tests.ci.register import register_cpu_ci
from tests.fast.ray.conftest import TrainProcess

register_cpu_ci(est_time=60, suite="stage-a-cpu")
register_cpu_ci(est_time=70, suite="stage-b-cpu")


def wait(owner, name, since, subjects=(), count=1, within=""):
    return {"owner": owner, "name": name, "since": since, "subjects": list(subjects), "count": count, "within": within}


def beat(role, pid, waits=(), *, written=100.0, stuck=None, at=(), blocks=False, children=None):
    return {
        "role": role, "pid": pid, "written": written, "loop_stuck_s": stuck, "blocks": blocks, "at": list(at),
        "children": children or {}, "waits": list(waits),
    }  # fmt: skip


def graph(*beats, states=None):
    states = states or {}
    return wait_graph.build(beats, 100.5, lambda pid: states.get(pid, "sleeping"))


DRIVER = beat("driver", 1, [wait("rollout manager", "generate step 7", 55.0)])


def test_the_chain_goes_through_the_router_to_the_engine_that_is_stopped():
    driver = graph(
        DRIVER,
        beat("rollout-manager", 2, [wait("router", "generate", 56.0, ["3-24-ab", "3-25-cd"], 2)], children={"router": 3}),
        beat("router", 3, [wait("engine-0", "/generate", 56.0, ["3-24-ab"]), wait("engine-1", "/generate", 99.0)]),
        beat("engine-0-actor", 4, children={"engine-0": 5}),
        beat("engine-0", 5, written=60.0),
        beat("engine-1-actor", 6, children={"engine-1": 7}),
        states={5: "stopped"},
    )  # fmt: skip
    assert wait_graph.render(driver).splitlines() == [
        "wait graph:",
        "  driver (pid 1, sleeping, heartbeat 0 s ago)",
        "    waits 46 s for rollout manager: generate step 7",
        "      rollout-manager (pid 2, sleeping, heartbeat 0 s ago)",
        "        waits 44 s for router: generate, 2 times [3-24-ab, 3-25-cd]",
        "          router (pid 3, sleeping, heartbeat 0 s ago)",
        "            waits 44 s for engine-0: /generate [3-24-ab]",
        "              engine-0 (pid 5, stopped, heartbeat 40 s ago)",
        "            waits 2 s for engine-1: /generate",
        "              engine-1 (pid 7, sleeping)",
        "probably: engine-0 (pid 5) is stopped by a signal; kill -CONT 5 lets it go on "
        "(waited 44 s for engine-0: /generate [3-24-ab])",
    ]


def test_a_reward_is_the_end_of_the_chain_by_its_path_and_prompt():
    manager = beat("rollout-manager", 2, [wait("my.reward", "reward", 56.0, ["group 12 sample 98"])])
    found = wait_graph.culprit(graph(DRIVER, manager))
    assert found.text == "rollout-manager waits 44 s for my.reward: reward [group 12 sample 98]"
    assert [p.role for p in found.involved] == ["driver", "rollout-manager"]


def test_samples_whose_turn_has_not_come_are_never_the_cause():
    queue = wait(wait_graph.QUEUE, "a free place to generate", 10.0, count=500)
    manager = beat("rollout-manager", 2, [queue, wait("my.generate", "generate", 56.0)])
    assert "my.generate" in wait_graph.culprit(graph(DRIVER, manager)).text


def test_a_stuck_event_loop_is_told_with_its_place_and_for_a_trainer_it_is_work():
    stuck = beat("rollout-manager", 2, [wait("my.reward", "reward", 56.0)], stuck=40.0, at=["my.py:3 in judge"])
    assert wait_graph.culprit(graph(DRIVER, stuck)).text.startswith(
        "rollout-manager (pid 2): event loop stuck for 40 s at my.py:3 in judge"
    )
    driver = beat("driver", 1, [wait("trainer", "train step 7", 90.0)])
    ranks = [beat(f"trainer-{r}", 10 + r, stuck=9.0, at=["loss.py:5 in step"], blocks=True) for r in (0, 1)]
    found = wait_graph.culprit(graph(driver, *ranks))
    assert re.match(r"trainer-0 .*: busy for 10 s at loss\.py:5 in step", found.text)
    assert [p.role for p in found.involved] == ["driver", "trainer-0", "trainer-1"]
    found = wait_graph.culprit(graph(driver, *ranks, states={11: "gone"}))
    assert found.text.startswith("trainer-1 (pid 11) is gone")


def test_a_process_that_runs_but_says_nothing_is_in_native_code():
    found = wait_graph.culprit(graph(DRIVER, beat("rollout-manager", 2, written=50.0), states={2: "running"}))
    assert "silent for 50 s though running" in found.text


def test_a_chain_begins_with_the_wait_that_is_asked_about():
    driver = beat("driver", 1, [wait("rollout manager", "start", 50.0), wait("trainer", "start", 51.0)])
    both = graph(driver, beat("rollout-manager", 2), beat("trainer-0", 3))
    assert wait_graph.culprit(both).text.startswith("rollout-manager (pid 2)")
    assert wait_graph.culprit(both, "trainer", "start").text.startswith("trainer-0 (pid 3)")


def test_a_process_in_trouble_goes_before_an_older_wait_for_one_that_is_well():
    driver = beat("driver", 1, [wait("engines", "prove", 50.0), wait("rollout manager", "state", 60.0)])
    beats = [driver, beat("rollout-manager", 2), beat("engine-0", 3)]
    assert wait_graph.culprit(graph(*beats)).text.startswith("engine-0 (pid 3), sleeping")
    assert wait_graph.culprit(graph(*beats, states={2: "stopped"})).text.startswith(
        "rollout-manager (pid 2) is stopped"
    )


def test_an_inner_wait_is_told_with_the_outer_one():
    driver = beat("driver", 1, [wait("rollout manager", "state", 60.5, within="engines: prove")])
    text = wait_graph.render(graph(driver, beat("rollout-manager", 2)))
    assert "waits 40 s for rollout manager: state, within engines: prove" in text


def test_young_waits_below_an_old_one_mean_that_work_goes_on():
    found = wait_graph.culprit(graph(DRIVER, beat("rollout-manager", 2, [wait("my.reward", "reward", 99.5)])))
    assert found.text.startswith("nothing that is old by itself")


def test_a_process_that_was_replaced_does_not_speak_for_the_new_one():
    manager = beat("rollout-manager", 2, [wait("engine-0", "start", 99.0)])
    old = beat("engine-0", 5, [wait("x", "y", 1.0)], written=20.0)
    driver = graph(DRIVER, manager, beat("engine-0-actor", 4, children={"engine-0": 6}), old)
    (engine,) = driver.waits[0].on[0].waits[0].on
    assert (engine.pid, engine.heartbeat_s, engine.waits) == (6, None, [])


def test_waits_in_a_circle_end_and_a_large_graph_keeps_to_forty_lines():
    back = [wait("driver", "answer", 60.0), *(wait(f"http://tool-{i}", "call", 61.0) for i in range(30))]
    text = wait_graph.render(graph(DRIVER, beat("rollout-manager", 2, back)))
    assert "driver, see above" in text
    assert "+ 23 waits more" in text
    ranks = [beat(f"trainer-{r}", 10 + r, [wait(f"s{i}", "x", 1.0) for i in range(8)]) for r in range(64)]
    text = wait_graph.render(graph(beat("driver", 1, [wait("trainer", "train step 7", 90.0)]), *ranks))
    assert len(text.splitlines()) == wait_graph.MOST_LINES
    assert text.splitlines()[-1].startswith("probably: trainer-")


def test_this_process_is_alive_and_one_that_ended_is_gone():
    assert wait_graph.process_state(os.getpid()) in ("running", "sleeping")
    assert wait_graph.process_state(2**22 + 1) == "gone"


def test_the_explainer_notes_the_graph_and_writes_the_stacks(tmp_path, monkeypatch):
    """With a py-spy that may not look, as where ptrace is not allowed."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "bin").mkdir()
    py_spy = tmp_path / "bin" / "py-spy"
    py_spy.write_text("#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n")
    py_spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{py_spy.parent}:{os.environ['PATH']}")
    events = EventLog(tmp_path / "events.jsonl")
    with heartbeat.of_driver(tmp_path), OPEN.on("my.tool", "answer", group=3):
        text = HangExplainer(tmp_path, events).stalled("my.tool", "answer")
    assert "probably: driver waits 0 s for my.tool: answer [group 3]" in text
    assert "py-spy on driver: Permission Denied" in text
    told = Path(re.search(r"stacks: (\S+)", text)[1]).read_text()
    assert "in test_the_explainer_notes" in told
    (row,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (row["event"], row["cause"], row["graph"]["role"]) == ("wait graph", "stalled", "driver")
    assert row["graph"]["waits"][0]["subjects"] == ["group 3"]
    assert not (tmp_path / heartbeat.FOLDER).exists()


def test_a_process_without_a_heartbeat_is_not_signalled(tmp_path):
    sleeper = psutil.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        stacks.collect({}, {"engine-0": sleeper.pid}, tmp_path, tmp_path / "out.txt")
        assert "has no heartbeat" in (tmp_path / "out.txt").read_text()
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


# ---- whole runs


async def hangs_on_sample_5(args, sample, **kwargs):
    await asyncio.sleep(3600 if sample.index == 5 else 0)
    return len(sample.response) % 3


def blocks_its_thread_on_sample_5(args, sample, **kwargs):
    if sample.index == 5:
        threading.Event().wait(3600)
    return len(sample.response) % 3


async def blocks_the_loop_on_sample_5(input):
    from miles.rollout.generate_hub.single_turn import generate

    if input.sample.index == 5:
        time.sleep(3600)
    return await generate(input)


async def digits(args, sample, **kwargs):
    await asyncio.sleep(0.05)
    return sum(c.isdigit() for c in sample.response) / 6


def here(name: str) -> str:
    return f"tests.fast.ray.test_hang.{name}"


LIMITS = ["--cluster.wait-timeout-s", "12", "--cluster.wait-report-s", "4", "--reward.timeout-s", "3600"]


def event_rows(run_dir: Path, name: str) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


def read_until(train: TrainProcess, pattern: str) -> str:
    read = []
    for line in train.process.stdout:
        read.append(line)
        if re.search(pattern, line):
            return "".join(read)
    raise AssertionError("".join(read))


def test_a_reward_that_never_returns_is_shown_on_request_and_ends_the_run(flags, tmp_path):
    run = tmp_path / "run"
    train = TrainProcess(*flags, *LIMITS, "--custom-rm-path", here("hangs_on_sample_5"))
    told = read_until(train, "waiting for rollout manager: generate")
    assert re.search(rf"probably: rollout-manager waits \d s for {here('hangs_on_sample_5')}: reward", told)
    train.process.send_signal(signal.SIGUSR1)
    shown = read_until(train, "^stacks: ")
    print(shown)
    assert re.search(r"driver \(pid \d+, sleeping, heartbeat 0 s ago\)\n +waits \d+ s for rollout manager: gen", shown)
    assert re.search(rf"waits \d+ s for {here('hangs_on_sample_5')}: reward \[group 1 sample 5\]", shown)
    stack_file = Path(re.search(r"stacks: (\S+)", shown)[1])
    assert "==== rollout-manager, process" in stack_file.read_text()
    assert "Thread 0x" in stack_file.read_text()
    assert re.search(
        r"Task .*\(innermost first\):\n.*/asyncio/tasks\.py.*\n.*in hangs_on_sample_5", stack_file.read_text()
    )
    ended = train.end(timeout_s=90)
    print(ended.err)
    assert ended.status == 1
    assert re.search(r"waited 1\d s for rollout manager: generate step 0; the limit is 12 s\nwait graph:", ended.err)
    assert re.search(rf"probably: .*{here('hangs_on_sample_5')}: reward \[group 1 sample 5\]", ended.err)
    assert "Traceback" not in ended.err
    assert ended.left_behind == []
    causes = [row["cause"] for row in event_rows(run, "wait graph")]
    assert {"long wait", "SIGUSR1", "stalled"} <= set(causes)
    (manager,) = event_rows(run, "wait graph")[-1]["graph"]["waits"][0]["on"]
    assert manager["waits"][0]["subjects"] == ["group 1 sample 5"]


def test_a_stopped_process_is_named_while_it_is_stopped_and_ends_with_the_run(flags, tmp_path):
    run = tmp_path / "run"
    train = TrainProcess(*flags, "--num-rollout", "1000", "--custom-rm-path", here("digits"))
    read_until(train, "^step")
    engine = event_rows(run, "started")[0]["pids"]["engine-0"]
    manager = json.loads((run / "waits" / "rollout-manager.json").read_text())["pid"]

    def stop_and_ask(pid: int) -> str:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)  # the driver comes to wait for it
        train.process.send_signal(signal.SIGUSR1)
        shown = read_until(train, "^stacks: ")
        print(shown)
        return shown

    told = stop_and_ask(manager)
    os.kill(manager, signal.SIGCONT)
    read_until(train, "^step")
    assert f"probably: rollout-manager (pid {manager}) is stopped by a signal; kill -CONT {manager} lets" in told
    told = stop_and_ask(engine)
    assert f"probably: engine-0 (pid {engine}) is stopped by a signal; kill -CONT {engine} lets it go on" in told
    assert re.search(r"waits \d+ s for (engine-0: |engines: )", told)
    train.process.send_signal(signal.SIGTERM)
    ended = train.end(timeout_s=60)
    assert ended.status == 130
    assert ended.left_behind == []


@pytest.mark.slow
@pytest.mark.parametrize("function", ["blocks_the_loop_on_sample_5", "blocks_its_thread_on_sample_5"])
def test_a_blocked_loop_and_a_blocked_thread_are_told_apart(flags, tmp_path, function):
    blocks_loop = function == "blocks_the_loop_on_sample_5"
    flag = "--custom-generate-function-path" if blocks_loop else "--custom-rm-path"
    train = TrainProcess(*flags, *LIMITS, flag, here(function))
    ended = train.end(timeout_s=120)
    print(ended.err)
    assert ended.status == 1
    if blocks_loop:
        assert re.search(rf"event loop stuck for \d+ s at \S*test_hang\.py:\d+ in {function}", ended.err)
    else:
        assert re.search(rf"probably: .*{here(function)}: reward \[group 1 sample 5\]", ended.err)
    stack_file = Path(re.search(r"stacks: (\S+)", ended.err)[1])
    assert f"in {function}" in stack_file.read_text()
    assert ended.left_behind == []
