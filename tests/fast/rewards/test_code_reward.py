import asyncio
import os
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.core.samples import Sample
from miles.rollout.rm_hub.code_reward import CodeGrader
from miles.rollout.rm_hub.graders import LabelError
from tests.ci.register import register_cpu_ci

register_cpu_ci(est_time=55, suite="stage-a-cpu")

LEVELS = ["auto", "basic"]


def family():
    return {p.pid for p in psutil.Process().children(recursive=True)}


def wait_for(condition, seconds=10.0):
    """Whether `condition` comes to hold. Twice in a row: a list of processes misses those that change parents as it is made."""
    deadline = time.monotonic() + seconds
    while not (held := condition() and condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


class Judge:
    """A grader and the verdict of one program with one test."""

    def __init__(self, **changes):
        values = {
            "sample_s": 30.0,
            "num_workers": 1,
            "time_s": 1.0,
            "memory_bytes": 512 << 20,
            "partial_credit": False,
        }
        self.grader = CodeGrader(**(values | changes))

    def __call__(self, code, label=None, **metadata):
        sample = Sample(index=3, group_index=1, label=label, metadata=metadata)
        return asyncio.run(self.grader.grade_sample(code, sample))

    def script(self, code, stdin="", expected=""):
        return self(code, {"inputs": [stdin], "outputs": [expected]})

    def call(self, code, args, expected, name="f"):
        return self(code, {"fn_name": name, "inputs": [args], "outputs": [expected]})


@pytest.fixture(scope="module", params=LEVELS)
def judge(request):
    before = family()
    made = Judge(level=request.param)
    yield made
    made.grader.close()
    assert wait_for(lambda: family() <= before)
    assert not os.path.exists(made.grader._root)


@pytest.mark.parametrize(
    ("code", "stdin", "expected", "reward"),
    [
        ("print(int(input()) + 1)", "41", "42\n", 1),
        ("print(int(input()) + 1)", "41\n", "42", 1),
        ("print(int(input()) + 1)", "41", "43", 0),
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd", "ba\ndc", 1),
        ("def main():\n    print('in main')\nif __name__ == '__main__':\n    main()", "", "in main", 1),
        ("print('a'); exit()\nprint('b')", "", "a", 1),
        ("import threading\nt = threading.Thread(target=lambda: print(input()))\nt.start()", "x", "x", 1),
        ("import atexit\natexit.register(print, 'late')", "", "late", 1),
        (
            "import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(5000))",
            "",
            "5000",
            1,
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1).x, __name__)",
            "",
            "1 __main__",
            1,
        ),
        ("print('é\\u2028ü')", "", "é\u2028ü", 1),
        ("open('mine', 'w').write('x')\nprint(open('mine').read())", "", "x", 1),
        ("import os\nprint(os.listdir('.'))", "", "[]", 1),
        ("this is no python", "", "", 0),
        ("import numpy", "", "", 0),
    ],
)
def test_scripts_are_judged_by_what_they_print(judge, code, stdin, expected, reward):
    assert judge.script(code, stdin, expected) == reward


# Case A28.
def test_a_solution_that_raises_gets_nothing_even_where_nothing_is_expected(judge):
    assert judge.call("def f(x): raise ValueError('failed call')", ["1"], "") == 0
    assert judge.call("def f(x): return ''", ["1"], "") == 1
    assert judge.script("raise ValueError('failed call')", "1", "") == 0
    assert judge.script("", "1", "") == 0  # no program at all
    assert judge.script("pass", "1", "") == 1


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('told why')",
        "import os; os._exit(1)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\nimport time; time.sleep(60)",
        "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        "import sys\nsys.excepthook = lambda *a: None\n1 / 0",
        "import traceback, sys\ntraceback.print_exc = print\nsys.stderr = open('x', 'w')\n1 / 0",
        "import ctypes; ctypes.string_at(0)",
        "raise KeyboardInterrupt",
        "def f(): f()\nf()",
    ],
)
def test_status_and_standard_error_are_looked_at_before_the_output(judge, code):
    assert judge.script(code, "", "") == 0


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)\ndef f(x): return x + 1",
        "import os; os._exit(0)\ndef f(x): return x + 1",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x):\n    import sys\n    sys.exit(0)",
        "print('{\"held\": true}'); print('OK'); print(2)\ndef f(x): pass",
        "class Same:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\ndef f(x): return Same()",
        "class Two(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n    def __int__(self): return 2\n    __index__ = __int__\ndef f(x): return Two(7)",
        "class L(list):\n    def __iter__(self): return iter([2])\n    def __eq__(self, o): return True\n    __len__ = lambda s: 1\ndef f(x): return L()",
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.__import__ = None\ndef f(x): return 3",
        "import json\njson.dumps = lambda *a, **k: '{\"parts\": [3]}'\ndef f(x): return 3",
        "import builtins\nbuiltins.type = lambda x: int\nbuiltins.repr = builtins.str = lambda x: '2'\ndef f(x): return object()",
        "def f(x):\n    try:\n        raise SystemExit\n    except SystemExit:\n        return 5",
    ],
)
def test_success_cannot_be_pretended(judge, code):
    assert judge.call(code, [1], 2) == 0
    assert judge(code, ["assert f(1) == 2"]) == 0
    assert judge(code, ["assert 2 == f(1)"]) == 0


def test_builtins_of_the_tests_are_not_those_that_the_solution_has_changed(judge):
    fake = "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.max = lambda x: 3\ndef f(x): return [x]"
    assert judge(fake, ["assert abs(f(1)[0] - 5) < 1e-6"]) == 0
    assert judge(fake, ["assert max(f(1)) == 3"]) == 0
    assert judge(fake, ["assert max(f(1)) == 1", "assert abs(f(2)[0]) == 2"]) == 1
    all_of_them = "import builtins\nbuiltins.isinstance = builtins.callable = lambda *a: True\ndef f(x): return [x]"
    assert judge(all_of_them, ["assert isinstance(f(1), dict)"]) == 0


@pytest.mark.parametrize(
    ("code", "counter"),
    [
        ("while True: pass", "rollout/reward_timeouts"),
        ("import time; time.sleep(600)", "rollout/reward_timeouts"),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", "rollout/reward_timeouts"),
        ("import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass", "rollout/reward_timeouts"),
        ("import sys\nwhile True: print('x' * 1000)", "rollout/code/output"),
        ("import os\nwhile True: os.write(2, b'x' * 1000)", "rollout/code/output"),
        ("import os, time\nfor i in range(400):\n    if os.fork() == 0: time.sleep(600)\nprint('all')", None),
        ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass", None),
        ("x = [bytearray(1 << 28) for _ in range(9)]\nprint('all')", None),
        ("f = open('x', 'wb')\nfor _ in range(100): f.write(b'x' * (1 << 20))\nf.flush()\nprint('all')", None),
        ("import os\nfs = [open('/dev/null') for _ in range(500)]\nprint('all')", None),
    ],
)  # fmt: skip
def test_greedy_programs_are_ended_and_leave_nothing(judge, code, counter):
    before, start = judge.grader.metrics(), time.monotonic()
    workers = family()
    assert judge.script(code, "", "all") == 0
    assert time.monotonic() - start < 20
    if counter:
        assert judge.grader.metrics()[counter] == before[counter] + 1
    assert judge.script("print('still here')", "", "still here") == 1
    assert wait_for(lambda: len(family()) <= max(3, len(workers) + 1))


def test_processes_that_leave_their_group_are_ended_too(judge):
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        for fd in range(3): os.close(fd)
        import ctypes; ctypes.CDLL(None).prctl(15, b"esc{marker[-8:]}", 0, 0, 0)
        time.sleep(600)
    os._exit(0)
time.sleep(0.2)
print("left")
"""
    judge.script(code, "", "left")
    name = f"esc{marker[-8:]}"
    assert not [p for p in psutil.process_iter(["name"]) if p.info["name"] == name]


def test_there_is_no_network_and_no_environment(judge, monkeypatch):
    import socket

    monkeypatch.setenv("SECRET_OF_TEST", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 1)\n    print('reached')\nexcept OSError:\n    print('refused')"
        assert judge.script(reach, "", "refused") == 1
    assert judge.script("import os\nprint('SECRET_OF_TEST' in os.environ, len(os.environ) < 5)", "", "False True") == 1


def test_programs_do_not_see_each_other_or_what_is_expected(judge):
    assert (
        judge.script("open('left', 'w').write('x')\nimport builtins, sys\nbuiltins.left = 1\nsys.left = 1", "", "")
        == 1
    )
    assert judge.script("import os, builtins, sys\nprint(os.listdir('.'), hasattr(builtins, 'left'), hasattr(sys, 'left'))", "", "[] False False") == 1  # fmt: skip
    spy = """
import gc, os
found = [o for o in gc.get_objects() if isinstance(o, dict) and any(isinstance(v, str) and "EXPEC" + "TED-77" in v for v in list(o.values()))]
print("seen" if found or any("EXPEC" + "TED-77" in s for s in map(str, vars().values())) else "EXPEC" + "TED-77")
"""
    assert judge.script(spy, "", "EXPECTED-77") == 1


def test_descriptors_of_the_worker_are_not_inherited(judge):
    assert judge.script("import os\nprint(sorted(map(int, os.listdir('/proc/self/fd')))[:3])\nfor fd in range(3, 200):\n    try:\n        os.fstat(fd)\n        print(fd)\n    except OSError: pass", "", "[0, 1, 2]") == 1  # fmt: skip


def test_with_namespaces_files_are_read_only_and_other_processes_are_not_seen():
    judge = Judge()
    code = "import os\ntry:\n    open('/tmp/of-test', 'w')\nexcept OSError as e: print(type(e).__name__)\nprint(os.getpid() < 10)"
    try:
        reward = judge.script(code, "", "OSError\nTrue")
        sample = Sample(label={"inputs": [""], "outputs": [""]})
        assert asyncio.run(judge.grader.grade_sample("pass", sample)) == 1
    finally:
        judge.grader.close()
    if reward == 0:
        pytest.skip("this machine allows no namespaces")


def test_partial_credit_is_the_fraction_of_tests_and_costs_are_bounded_per_sample():
    judge = Judge(partial_credit=True, time_s=0.3, sample_s=0.5)
    try:
        label = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "x", "4"]}
        assert judge("print(input())", label) == 0.75
        assert judge("while True: pass", label) == 0
        metrics = judge.grader.metrics()
        assert 2 <= metrics["rollout/reward_timeouts"] <= 3  # one program or two, and the sample
        assert metrics["rollout/code/exit"] == 4
    finally:
        judge.grader.close()


def test_a_sandbox_that_cannot_shut_a_program_in_is_an_error_and_no_verdict(monkeypatch):
    from miles.errors import HookError

    judge = Judge()
    judge.grader._limits["open_files"] = "many"
    try:
        with pytest.raises(HookError, match="could not be shut in: TypeError"):
            judge.script("print(1)", "", "1")
    finally:
        judge.grader.close()


@pytest.fixture(scope="module")
def fuzzed():
    before = family()
    made = Judge(time_s=0.3)
    yield made
    made.grader.close()
    assert wait_for(lambda: family() <= before)


STATEMENTS = st.sampled_from(
    [
        "import os; os._exit(0)", "raise SystemExit(0)", "while 1: pass", "os = __import__('os'); os.fork()",
        "print('x' * 10**6)", "__import__('os').close(1)", "__import__('os').close(2)", "__import__('sys').stdout.close()",
        "del __builtins__", "__builtins__.__dict__.clear()", "import sys; sys.modules.clear()", "x = '\\ud800'; print(x)",
        "__import__('os').kill(__import__('os').getppid(), 9)", "__import__('os').kill(-1, 15)", "__import__('os').chdir('/')",
        "__import__('os').rmdir(__import__('os').getcwd())", "__import__('os').chmod('.', 0)", "f = lambda x: f(x)",
        "__import__('signal').alarm(1)", "__import__('os').setpgid(0, 0)", "__import__('threading').Thread(target=lambda: __import__('time').sleep(99)).start()",
        "__import__('os').write(3, b'{}')", "__import__('resource').setrlimit(7, (0, 0))", "1/0", "(", "\0", "x = 1",
    ]
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(STATEMENTS | st.text(max_size=30), max_size=4), stdin=st.text(max_size=30), call=st.booleans())
def test_whatever_a_program_does_the_verdict_comes_in_time_and_nothing_is_left(fuzzed, lines, stdin, call):
    start = time.monotonic()
    code = "\n".join(lines)
    expected = "\u0000never printed\u0000"
    reward = fuzzed.call(code, [stdin], expected) if call else fuzzed.script(code, stdin, expected)
    assert reward == 0
    assert time.monotonic() - start < 8
    assert fuzzed.grader.metrics()["rollout/reward_crashes"] == 0
    assert wait_for(lambda: len(family()) <= 8)


def test_tests_that_cannot_be_read_are_an_error_of_the_label():
    judge = Judge()
    try:
        with pytest.raises(LabelError, match="it has no tests"):
            judge("print(1)")
    finally:
        judge.grader.close()


@pytest.mark.parametrize("level", LEVELS)
def test_a_worker_that_is_killed_takes_its_programs_with_it(level):
    before = family()
    judge = Judge(level=level, time_s=60.0)
    name = f"kil{time.monotonic_ns() % 10**9}"
    code = f"import ctypes, os, time\nos.setsid() if os.fork() == 0 else None\ntime.sleep(600)\n# {name}"
    try:
        judge.script("pass")
        (worker,) = judge.grader._pool.pids()

        async def run():
            job = asyncio.ensure_future(
                judge.grader.grade_sample(code, Sample(label={"inputs": [""], "outputs": [""]}))
            )
            await asyncio.sleep(0.5)
            running = len(family() - before)
            os.kill(worker, 9)
            await asyncio.sleep(0.5)
            (second,) = judge.grader._pool.pids()
            os.kill(second, 9)
            return running, await job

        running, reward = asyncio.run(run())
        assert running >= 5  # nursery, worker, keeper, program and its child
        assert reward == 0
        assert judge.grader.metrics()["rollout/reward_crashes"] == 1
        assert wait_for(lambda: len(family() - before) <= 1)
    finally:
        judge.grader.close()
    assert wait_for(lambda: family() <= before)


def test_sets_and_random_numbers_come_out_the_same_in_every_run():
    outputs = set()
    for _ in range(2):
        judge = Judge(partial_credit=True)
        try:
            code = "import random\nprint(list({'a', 'b', 'c', 'd'}), random.random())"
            limits = judge.grader._limits
            outputs.add(judge.grader._pool.run_blocking(code, "", None, limits).value["stdout"])
        finally:
            judge.grader.close()
    assert len(outputs) == 1
