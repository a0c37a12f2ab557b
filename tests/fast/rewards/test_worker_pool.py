import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.errors import HookError
from miles.rollout.rm_hub.worker_pool import Outcome, WorkerPool

FUNCTIONS = """
import os
import time

def once(path):
    if os.path.exists(path):
        return "second"
    open(path, "w").close()
    os._exit(3)

def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds

def leaves(code):
    raise SystemExit(code)

def odd(kind):
    if kind == "unserialisable":
        return object()
    if kind == "recursion":
        return odd(kind)
    if kind == "raises":
        raise KeyError(kind)
    if kind == "hangs":
        time.sleep(600)
    if kind == "ends":
        os._exit(1)
    return kind

def who():
    return [os.getpid(), os.getppid()]
"""


def gone(pid):
    """Whether a process has ended; one that only waits for the system's first process to reap it has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and psutil.Process(pid).ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


def wait_for(condition, seconds=10.0):
    """Whether `condition` comes to hold. Twice in a row: a list of processes misses those that change parents as it is made."""
    deadline = time.monotonic() + seconds
    while not (held := condition() and condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


def family():
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "pool_functions_of_test.py").write_text(FUNCTIONS)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    yield
    patch.undo()


@pytest.fixture
def make_pool():
    before = family()
    pools = []

    def make(function, **settings):
        function = function if "." in function else f"pool_functions_of_test.{function}"
        pools.append(WorkerPool(function, **{"size": 1, "timeout_s": 10.0, **settings}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert wait_for(lambda: family() <= before)


# Case A33.
def test_stuck_jobs_are_killed_and_do_not_keep_their_place(make_pool):
    pool = make_pool("time.sleep", size=2, timeout_s=0.5)

    async def run():
        await asyncio.gather(pool.run(0), pool.run(0))  # the workers are up
        start = time.monotonic()
        outcomes = await asyncio.gather(*(pool.run(s) for s in (600, 600, 600, 0, 0)))
        return outcomes, time.monotonic() - start

    outcomes, seconds = asyncio.run(run())
    assert [o.timed_out for o in outcomes] == [True, True, True, False, False]
    assert pool.num_timeouts == 3
    assert seconds < 2 * 0.5 + 4
    pids = pool.pids()
    pool.close()
    assert all(gone(pid) for pid in pids)
    assert not [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]


def test_quick_jobs_do_not_wait_for_slow_ones_that_came_first(make_pool):
    pool = make_pool("compute", size=2, timeout_s=30.0)
    assert pool.run_blocking(0).value == 0

    async def run():
        slow = [asyncio.ensure_future(pool.run(0.4)) for _ in range(4)]
        await asyncio.sleep(0.05)
        start = time.monotonic()
        quick = await asyncio.gather(*(pool.run(0) for _ in range(20)))
        seconds = time.monotonic() - start
        still = sum(not job.done() for job in slow)
        return quick, seconds, still, await asyncio.gather(*slow)

    quick, seconds, still, slow = asyncio.run(run())
    assert all(outcome.value == 0 for outcome in quick)
    assert (still, [outcome.value for outcome in slow]) == (4, [0.4] * 4)
    assert seconds < 2
    assert pool.counters.slowed >= 2


def test_more_slow_jobs_than_places_for_them_begin_anew_and_are_answered_too(make_pool):
    pool = make_pool("compute", size=1, timeout_s=30.0)
    pool.run_blocking(0)

    async def run():
        slow = [asyncio.ensure_future(pool.run(0.1)) for _ in range(7)]
        quick = await asyncio.gather(*(pool.run(0) for _ in range(5)))
        return quick, await asyncio.gather(*slow)

    quick, slow = asyncio.run(run())
    assert [o.value for o in quick] == [0] * 5
    assert [o.value for o in slow] == [0.1] * 7
    assert len(pool.pids()) <= 6


def test_a_computing_job_has_its_limit_in_processor_time_and_it_is_counted(make_pool):
    pool = make_pool("compute", timeout_s=0.5)
    assert pool.run_blocking(0.3).value == 0.3
    assert pool.counters.cpu_s == pytest.approx(0.3, abs=0.1)
    start = time.monotonic()
    assert pool.run_blocking(100).timed_out
    assert 0.45 < time.monotonic() - start < 0.5 * 10 + 1


# Case A19.
def test_jobs_may_come_from_any_thread_and_any_loop_at_once(make_pool):
    pool = make_pool("math.hypot", size=2)
    results = []

    def in_a_loop():
        async def run():
            return [outcome.value for outcome in await asyncio.gather(*(pool.run(3, 4) for _ in range(50)))]

        results.extend(asyncio.run(run()))

    def in_a_thread():
        results.extend(pool.run_blocking(3, 4).value for _ in range(50))

    threads = [threading.Thread(target=t) for t in (in_a_loop, in_a_thread) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [5.0] * 300


def test_small_jobs_are_not_dominated_by_their_round_trips(make_pool):
    pool = make_pool("math.hypot", size=2)
    pool.run_blocking(3, 4)

    async def run():
        start = time.monotonic()
        await asyncio.gather(*(pool.run(3, 4) for _ in range(5000)))
        return 5000 / (time.monotonic() - start)

    assert asyncio.run(run()) > 2000


def test_a_job_that_nobody_waits_for_any_more_is_left_out(make_pool):
    pool = make_pool("compute")

    async def run():
        await pool.run(0)
        running = asyncio.ensure_future(pool.run(0.3))
        dropped = [asyncio.ensure_future(pool.run(5)) for _ in range(10)]
        await asyncio.sleep(0.01)
        for job in dropped:
            job.cancel()
        return (await running).value, (await pool.run(0)).value

    start = time.monotonic()
    assert asyncio.run(run()) == (0.3, 0)
    assert time.monotonic() - start < 8


def test_values_travel_as_json_and_workers_are_used_again(make_pool):
    pool = make_pool("who")
    assert len({tuple(pool.run_blocking().value) for _ in range(5)}) == 1
    long = make_pool("builtins.len")
    assert long.run_blocking("x" * 300_000 + "é\udcff\n").value == 300_003
    with pytest.raises(TypeError):
        long.run_blocking({1, 2})


def test_what_a_function_raises_and_a_function_that_is_not_there_are_hook_errors(make_pool):
    with pytest.raises(HookError, match=r"math\.sqrt: raised ValueError"):
        make_pool("math.sqrt").run_blocking(-1)
    with pytest.raises(HookError, match="cannot be imported in a worker process: ModuleNotFoundError"):
        make_pool("no_such_module.grade").run_blocking(1)


def test_what_a_function_prints_does_not_disturb_the_replies(make_pool):
    assert make_pool("builtins.print").run_blocking("hello").value is None


def test_a_worker_that_dies_is_replaced_and_its_job_tried_once_more(make_pool, tmp_path):
    pool = make_pool("once")
    assert pool.run_blocking(str(tmp_path / "seen")).value == "second"
    assert pool.num_crashes == 0
    killer = make_pool("leaves")
    assert killer.run_blocking(1).crashed
    assert killer.num_crashes == 1


def test_a_nursery_that_is_killed_is_replaced_and_no_job_is_lost(make_pool):
    pool = make_pool("who", size=2)
    worker, nursery = pool.run_blocking().value
    os.kill(nursery, signal.SIGKILL)
    assert wait_for(lambda: gone(worker))
    again = pool.run_blocking().value
    assert again[1] != nursery
    assert pool.num_crashes == 0


def test_a_job_may_not_take_the_machines_memory(make_pool):
    with pytest.raises(HookError, match="MemoryError"):
        make_pool("builtins.bytearray", memory_bytes=512 * 1024**2).run_blocking(2 * 1024**3)


@pytest.mark.parametrize("seconds", [0, 50])
def test_workers_end_when_their_owner_is_killed(seconds):
    code = (
        "import time\nfrom miles.rollout.rm_hub.worker_pool import WorkerPool\n"
        "pool = WorkerPool('time.sleep', size=1, timeout_s=60)\n"
        "pool.run_blocking(0)\nprint(pool.pids()[0], flush=True)\n"
        f"pool.run_blocking({seconds})\ntime.sleep(50)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    worker = int(owner.stdout.readline())
    nursery = psutil.Process(worker).ppid()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert wait_for(lambda: gone(worker) and gone(nursery))


def test_a_busy_worker_without_owner_is_ended_by_its_timer_after_the_limit():
    from miles.rollout.rm_hub import worker

    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-P", worker.__file__], stdin=theirs)
    theirs.close()
    greeting = {"sys_path": sys.path, "function": "time.sleep", "memory_bytes": 10**9}
    ours.sendall(json.dumps(greeting).encode() + b"\n")
    assert ours.recv(100) == b'{"ready": true}\n'
    jobs, its = socket.socketpair()
    socket.send_fds(ours, [worker.COMMAND.pack(b"F", 7)], [its.fileno()])
    its.close()
    assert worker.NOTE.unpack(ours.recv(worker.NOTE.size))[:2] == (b"P", 7)
    jobs.sendall(json.dumps([1, (0.2 - worker.GRACE_S) / worker.WALL_FACTOR, [100]]).encode() + b"\n")
    what, number, status = worker.NOTE.unpack(ours.recv(worker.NOTE.size))
    assert (what, number, os.WTERMSIG(status)) == (b"E", 7, signal.SIGALRM)
    ours.close()
    assert process.wait(10) == 0
    jobs.close()


def test_a_job_that_a_stopped_worker_does_not_read_ends_at_its_limit(make_pool):
    pool = make_pool("builtins.len", timeout_s=0.5)
    pool.run_blocking("x")
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    assert pool.run_blocking("x" * 1_000_000).timed_out  # more than a socket holds
    assert 0.4 < time.monotonic() - start < 5
    assert wait_for(lambda: gone(pid))
    assert pool.run_blocking("x" * 1_000_000).value == 1_000_000


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os, time; os.close(0); time.sleep(60)", "closed its socket at start and did not end"),
        ("raise SystemExit(7)", "ended at start with exit code 7"),
        ("import time; time.sleep(60)", "was not ready within 1 s"),
    ],
)
def test_a_worker_that_does_not_start_is_an_error_in_time(make_pool, tmp_path, monkeypatch, code, told):
    (tmp_path / "worker.py").write_text(code)
    monkeypatch.setattr("miles.rollout.rm_hub.nursery._WORKER_FILE", tmp_path / "worker.py")
    start = time.monotonic()
    with pytest.raises(HookError, match=f"its worker process {told}"):
        make_pool("builtins.len", start_timeout_s=1.0).run_blocking("x")
    assert time.monotonic() - start < 6


def test_a_closed_pool_takes_no_more_jobs_and_closing_ends_a_running_one(make_pool):
    pool = make_pool("time.sleep", timeout_s=60)
    pool.run_blocking(0)

    async def run():
        jobs = [asyncio.ensure_future(pool.run(50)) for _ in range(3)]
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await asyncio.to_thread(pool.close)
        return await asyncio.gather(*jobs), time.monotonic() - start

    outcomes, seconds = asyncio.run(run())
    assert all(outcome.crashed for outcome in outcomes)
    assert seconds < 5
    assert pool.pids() == []
    with pytest.raises(HookError, match="closed"):
        pool.run_blocking(0)


KINDS = ["fine", "unserialisable", "recursion", "raises", "hangs", "ends"]


@pytest.fixture(scope="module")
def odd_pool():
    before = family()
    pool = WorkerPool("pool_functions_of_test.odd", size=2, timeout_s=0.3)
    yield pool
    pool.close()
    assert wait_for(lambda: family() <= before)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(st.sampled_from(KINDS) | st.text(max_size=20), max_size=12), seed=st.integers(0, 2**16))
def test_whatever_jobs_do_each_has_its_own_outcome_in_time(odd_pool, jobs, seed):
    random.Random(seed).shuffle(jobs)

    async def run():
        return await asyncio.gather(*(odd_pool.run(job) for job in jobs), return_exceptions=True)

    start = time.monotonic()
    outcomes = asyncio.run(run())
    assert time.monotonic() - start < 10
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job in ("unserialisable", "recursion", "raises"):
            assert isinstance(outcome, HookError)
        elif job == "hangs":
            assert outcome == Outcome(timed_out=True)
        elif job == "ends":
            assert outcome == Outcome(crashed=True)
        else:
            assert outcome == Outcome(value=job)
    assert len(odd_pool.pids()) <= 11
