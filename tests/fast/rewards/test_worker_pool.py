import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from miles.errors import HookError
from miles.rollout.rm_hub.worker_pool import WorkerPool


def gone(pid):
    """Whether a process has ended; one that only waits for the system's first process to reap it has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and psutil.Process(pid).ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def make_pool():
    pools = []

    def make(function, **settings):
        pools.append(WorkerPool(function, **{"size": 1, "timeout_s": 10.0, **settings}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_stuck_jobs_are_killed_and_do_not_keep_their_place(make_pool):
    pool = make_pool("time.sleep", size=2, timeout_s=0.5)

    async def run():
        await asyncio.gather(pool.run(0), pool.run(0))  # both workers are up
        pids = pool.pids()
        start = time.monotonic()
        outcomes = await asyncio.gather(*(pool.run(s) for s in (600, 600, 600, 0, 0)))
        return pids, outcomes, time.monotonic() - start

    pids, outcomes, seconds = asyncio.run(run())
    assert [o.timed_out for o in outcomes] == [True, True, True, False, False]
    assert pool.num_timeouts == 3
    assert seconds < 2 * 0.5 + 4
    assert all(gone(pid) for pid in pids)
    last = pool.pids()
    pool.close()
    assert all(gone(pid) for pid in last)
    assert not [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]


def test_values_travel_as_json_and_workers_are_used_again(make_pool):
    pool = make_pool("math.hypot")
    assert [pool.run_blocking(3, 4).value for _ in range(3)] == [5.0] * 3
    assert len(pool.pids()) == 1
    long = make_pool("builtins.len")
    assert long.run_blocking("x" * 300_000 + "é\udcff\n").value == 300_003


def test_what_a_function_raises_and_a_function_that_is_not_there_are_hook_errors(make_pool):
    with pytest.raises(HookError, match=r"math\.sqrt: raised ValueError"):
        make_pool("math.sqrt").run_blocking(-1)
    with pytest.raises(HookError, match="cannot be imported in a worker process: ModuleNotFoundError"):
        make_pool("no_such_module.grade").run_blocking(1)


def test_what_a_function_prints_does_not_disturb_the_pipe(make_pool):
    assert make_pool("builtins.print").run_blocking("hello").value is None


def test_a_worker_that_dies_is_replaced_and_its_job_tried_once_more(make_pool, tmp_path):
    marker = tmp_path / "seen"
    flaky = "import os\ndef once(path):\n    if os.path.exists(path):\n        return 'second'\n    open(path, 'w')\n    os._exit(3)\n"
    (tmp_path / "flaky_of_test.py").write_text(flaky)
    sys.path.insert(0, str(tmp_path))
    try:
        pool = make_pool("flaky_of_test.once")
        assert pool.run_blocking(str(marker)).value == "second"
        assert pool.num_crashes == 0
        killer = make_pool("os._exit")
        assert killer.run_blocking(1).crashed
        assert killer.num_crashes == 1
    finally:
        sys.path.remove(str(tmp_path))


def test_a_job_may_not_take_the_machines_memory(make_pool):
    with pytest.raises(HookError, match="MemoryError"):
        make_pool("builtins.bytearray", memory_bytes=512 * 1024**2).run_blocking(2 * 1024**3)


def test_workers_end_when_their_owner_is_killed():
    code = (
        "from miles.rollout.rm_hub.worker_pool import WorkerPool\n"
        "pool = WorkerPool('time.sleep', size=1, timeout_s=60)\n"
        "pool.run_blocking(0)\nprint(pool.pids()[0], flush=True)\npool.run_blocking(50)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    idle_owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code.replace("run_blocking(50)", "_threads.submit(__import__('time').sleep, 50).result()"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    busy, idle = int(owner.stdout.readline()), int(idle_owner.stdout.readline())
    for process in (owner, idle_owner):
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert wait_for(lambda: gone(idle) and gone(busy))


def test_a_busy_worker_without_owner_is_ended_by_its_timer_after_the_limit():
    from miles.rollout.rm_hub import worker

    greeting = {"sys_path": sys.path, "function": "time.sleep", "memory_bytes": 10**9}
    process = subprocess.Popen(
        [sys.executable, "-P", worker.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdin.write(json.dumps(greeting) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == '{"ready": true}\n'
    process.stdin.write(json.dumps({"args": [100], "limit_s": 0.2 - worker.GRACE_S}) + "\n")
    process.stdin.flush()
    assert process.wait(10) == -signal.SIGALRM
    process.stdin.close()
    process.stdout.close()


def test_a_job_that_a_stopped_worker_does_not_read_ends_at_its_limit(make_pool):
    pool = make_pool("builtins.len", timeout_s=0.5)
    pool.run_blocking("x")
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    assert pool.run_blocking("x" * 1_000_000).timed_out  # more than a pipe holds
    assert 0.4 < time.monotonic() - start < 5
    assert gone(pid)
    pool.timeout_s = 10.0
    assert pool.run_blocking("x" * 1_000_000).value == 1_000_000


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os, time; os.close(1); time.sleep(60)", "closed its output at start and did not end"),
        ("raise SystemExit(7)", "ended at start with exit code 7"),
        ("import time; time.sleep(60)", "was not ready within 1 s"),
    ],
)
def test_a_worker_that_does_not_start_is_an_error_in_time(make_pool, tmp_path, monkeypatch, code, told):
    (tmp_path / "worker.py").write_text(code)
    monkeypatch.setattr("miles.rollout.rm_hub.worker_pool._WORKER_FILE", tmp_path / "worker.py")
    start = time.monotonic()
    with pytest.raises(HookError, match=f"its worker process {told}"):
        make_pool("builtins.len", start_timeout_s=1.0).run_blocking("x")
    assert time.monotonic() - start < 6


def test_a_closed_pool_takes_no_more_jobs_and_closing_ends_a_running_one(make_pool):
    pool = make_pool("time.sleep", timeout_s=60)
    pool.run_blocking(0)

    async def run():
        job = asyncio.ensure_future(pool.run(50))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await asyncio.to_thread(pool.close)
        return await job, time.monotonic() - start

    outcome, seconds = asyncio.run(run())
    assert outcome.crashed
    assert seconds < 5
    assert pool.pids() == []
    with pytest.raises((HookError, RuntimeError)):
        pool.run_blocking(0)
