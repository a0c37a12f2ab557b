import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
E2E = "tests/e2e"


def write(folder, **modules):
    for name, source in modules.items():
        path = folder / E2E / f"test_{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from tests.ci.register import register_cpu_ci, register_cuda_ci\n" + source)


def cpu(est_time=30.0, **more):
    values = "".join(f", {name}={value!r}" for name, value in more.items())
    return f'register_cpu_ci(est_time={est_time}, suite="stage-b-cpu"{values})\n'


def start(folder, *arguments, python=(sys.executable,), **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    # As from a terminal, also where this suite runs in the background and ignores interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [*python, "-m", "tests.ci.run", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder, *arguments, **how):
    process = start(folder, *arguments, **how)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def rows(out):
    """The table's lines: module without folder -> the words after it."""
    found = {}
    for line in out[out.rindex("\nmodule ") :].splitlines():
        name, *words = re.split(r" {2,}", line)
        if name.startswith(E2E) and name.endswith(".py"):
            found[name.removeprefix(f"{E2E}/test_").removesuffix(".py")] = words
    return found


def await_text(path, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} was never written")


def test_every_module_runs_and_the_table_comes_last(tmp_path):
    write(
        tmp_path,
        good=cpu(60) + "def test_a(): pass\ndef test_b(): pass\n",
        bad=cpu(50) + "def test_a(): pass\ndef test_b(): assert 1 + 1 == 3\n",
        broken=cpu(40) + "import no_such_module\n",
        empty=cpu(35) + "x = 1\n",
        dies=cpu(34) + "import os\ndef test_a(): os.kill(os.getpid(), 9)\n",
        skips=cpu(33) + "import pytest\ndef test_a(): pytest.skip('no disk')\n",
        off=cpu(32, disabled="waits for issue 31") + "def test_a(): pass\n",
        last=cpu(31) + "import pytest\n@pytest.mark.slow\ndef test_a(): pass\n",
    )
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--timeout=300", "-m", "not slow"]\n'
    )
    status, out, _ = run(tmp_path, "--suite", "stage-b-cpu", "--json", "table.json")
    assert status == 1
    found = rows(out)
    assert {name: words[2:] for name, words in found.items()} == {
        "good": ["passed", "2 passed"],
        "bad": ["failed", "1 passed, 1 failed"],
        "broken": ["failed", "1 errors"],
        "empty": ["nothing ran", "pytest found no test"],
        "dies": ["failed", "ended by signal 9"],
        "skips": ["skipped", "1 skipped"],
        "off": ["disabled", "waits for issue 31"],
        "last": ["passed", "1 passed"],
    }
    assert list(found) == ["good", "bad", "broken", "empty", "dies", "skips", "off", "last"]
    assert [words[1] for words in found.values()] == ["60", "50", "40", "35", "34", "33", "32", "31"]
    assert "assert (1 + 1) == 3" in out  # the end of pytest's own output
    assert "ModuleNotFoundError: No module named 'no_such_module'" in out
    table = json.loads((tmp_path / "table.json").read_text())
    assert (table["suite"], table["shard"]) == ("stage-b-cpu", "1/1")
    bad, off = (next(r for r in table["results"] if r["file"] == f"{E2E}/test_{name}.py") for name in ("bad", "off"))
    assert (bad["result"], bad["good"], bad["line"]) == ("failed", False, 2)
    assert 0 < bad["seconds"] < 50
    assert (off["result"], off["good"], off["seconds"]) == ("disabled", True, None)


def test_fail_fast_stops_after_the_first_that_fails(tmp_path):
    write(tmp_path, a=cpu(60) + "def test_a(): assert False\n", b=cpu(50) + "def test_a(): pass\n")
    status, out, _ = run(tmp_path, "--suite", "stage-b-cpu", "--fail-fast")
    assert status == 1
    assert rows(out)["b"] == ["-", "50", "not run"]


HANGS = """
import os, signal, subprocess, sys, time
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"

def test_it_never_ends():
    {ignore}
    beside = subprocess.Popen([sys.executable, "-c", STUBBORN])
    # A session of its own, whose parent is gone: in no group and below no one.
    script = f"from subprocess import *; print(Popen([{{sys.executable!r}}, '-c', {{STUBBORN!r}}], stdout=DEVNULL, stderr=DEVNULL).pid)"
    away = subprocess.run([sys.executable, "-c", script], start_new_session=True, capture_output=True, text=True)
    Path("pids").write_text(f"{{os.getpid()}} {{beside.pid}} {{away.stdout.strip()}}\\n")
    time.sleep(600)
"""
IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def ended(folder):
    pids = list(map(int, (folder / "pids").read_text().split()))
    assert len(pids) == 3
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_a_module_that_hangs_is_killed_at_its_limit_with_all_it_started_and_the_next_one_runs(tmp_path):
    write(tmp_path, hangs=cpu(2) + HANGS.format(ignore=IGNORES), next=cpu(1.9) + "def test_a(): pass\n")
    status, out, _ = run(tmp_path, "--suite", "stage-b-cpu", "--timeout-factor", 3, "--logs", "kept")
    assert status == 1
    assert ended(tmp_path)
    _, _, *words = rows(out)["hangs"]
    assert words == ["timed out", "stopped after its limit of 6 s"]
    assert rows(out)["next"][2] == "passed"
    log = (tmp_path / "kept/stage-b-cpu/tests.e2e.test_hangs.log").read_text()
    assert "test_it_never_ends" in log
    assert re.search(r'test_hangs.py", line \d+ in test_it_never_ends', log)  # where it hung


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_module_that_runs_with_all_it_started(tmp_path, number):
    write(tmp_path, hangs=cpu(60) + HANGS.format(ignore="pass"), next=cpu(50) + "def test_a(): pass\n")
    process = start(tmp_path, "--suite", "stage-b-cpu")
    try:
        await_text(tmp_path / "pids")
    finally:
        process.send_signal(number)
        process.send_signal(number)  # whoever is impatient leaves nothing behind either
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert ended(tmp_path)
    assert rows(out) == {"hangs": ["-", "60", "interrupted"], "next": ["-", "50", "not run"]}


def test_processes_that_a_green_module_leaves_are_killed_and_named(tmp_path):
    source = "import os, subprocess, sys\nfrom pathlib import Path\ndef test_a():\n"
    source += "    child = subprocess.Popen(['sleep', '617'], start_new_session=True)\n"
    source += "    Path('pids').write_text(f'{child.pid}\\n')\n"
    write(tmp_path, leaves=cpu(30) + source)
    status, out, _ = run(tmp_path, "--suite", "stage-b-cpu")
    assert status == 0
    assert rows(out)["leaves"][-1] == "1 passed; left 1 processes, which were killed: sleep 617"
    assert not psutil.pid_exists(int((tmp_path / "pids").read_text()))


def test_orphans_that_end_while_a_module_runs_do_not_stay_as_zombies(tmp_path):
    source = "import os, subprocess, time\ndef test_a():\n"
    source += "    pid = int(subprocess.run(['sh', '-c', 'sleep 0.1 >&- & echo $!'], capture_output=True).stdout)\n"
    source += "    deadline = time.monotonic() + 10\n"
    source += "    while os.path.exists(f'/proc/{pid}'):\n"
    source += "        assert time.monotonic() < deadline\n"
    write(tmp_path, orphan=cpu(30) + source)
    assert run(tmp_path, "--suite", "stage-b-cpu")[0] == 0


def test_estimates_that_are_far_off_are_listed_with_the_line_to_write(tmp_path):
    write(tmp_path, quick=cpu(30) + "def test_a(): pass\n")
    path = tmp_path / "tests/fast/data/test_long.py"
    path.parent.mkdir(parents=True)
    path.write_text("def test_a(): pass\n")
    status, out, _ = run(tmp_path, "--suite", "stage-b-cpu")
    assert status == 0
    seconds = rows(out)["quick"][0]
    assert (
        f"{E2E}/test_quick.py:2: est_time=30 took {seconds} s: write est_time={max(1, round(float(seconds)))}" in out
    )
    status, out, _ = run(tmp_path, "--suite", "stage-a-cpu")
    assert status == 0
    assert "write" not in out  # what a folder registers may well be quick


def test_nightly_modules_labels_and_shards_pick_what_runs(tmp_path):
    write(
        tmp_path,
        a=cpu(100, labels=["weights"]),
        b=cpu(60, labels=["weights", "moe"]),
        c=cpu(50, nightly=True),
        d=cpu(40, disabled="broken by issue 31"),
    )

    def listed(*arguments):
        status, out, err = run(tmp_path, "--list", "--suite", "stage-b-cpu", *arguments)
        assert status == 0, err
        return re.findall(r"test_(\w)\.py", out)

    assert listed() == ["a", "b", "d"]
    assert listed("--nightly") == ["a", "b", "c", "d"]
    assert listed("--label", "moe") == ["b"]
    assert listed("--label", "moe", "--label", "weights") == ["a", "b"]
    assert listed("--nightly", "--shard", "1/2") == ["a", "d"]
    assert listed("--nightly", "--shard", "2/2") == ["b", "c"]
    _, out, _ = run(tmp_path, "--list")
    assert "stage-b-cpu: 4 modules, about 210 s; needs 2 CPU cores, 16 GB" in out
    assert "stage-c-2-gpu-h200: 0 modules, about 0 s; needs 2 NVIDIA H200 of one host" in out
    assert f"      40 s  {E2E}/test_d.py  (disabled: broken by issue 31)" in out
    assert f"      60 s  {E2E}/test_b.py  (weights, moe)" in out


MISUSE = {
    "no suite": ([], "which suite? Fix: write --suite with one of stage-a-cpu, stage-b-cpu, stage-b-1-gpu-h200, "),
    "a label of no module": (
        ["--suite", "stage-b-cpu", "--label", "fp8"],
        "no module has the label fp8. Fix: there are weights",
    ),
    "nothing to run": (
        ["--suite", "stage-b-cpu", "--shard", "2/2"],
        "no module of stage-b-cpu is asked for. Fix: --list shows what each suite holds",
    ),
    "no such part": (
        ["--suite", "stage-b-cpu", "--shard", "3/2"],
        "argument --shard: 3/2 is no part of a whole; write 1/4 for the first of four",
    ),
    "no limit": (["--suite", "stage-b-cpu", "--timeout-factor", "0"], "--timeout-factor: 0 is no number above 0"),
}


@pytest.mark.parametrize(("arguments", "told"), MISUSE.values(), ids=MISUSE)
def test_what_cannot_run_is_told_with_the_way_out(tmp_path, arguments, told):
    write(tmp_path, a=cpu(labels=["weights"]))
    status, _, err = run(tmp_path, *arguments)
    assert status == 2
    assert told in err
    assert "Traceback" not in err


def test_mistakes_in_registrations_and_a_wrong_folder_end_the_runner_before_anything_runs(tmp_path):
    status, _, err = run(tmp_path, "--suite", "stage-b-cpu")
    assert (status, err) == (2, f"there is no folder tests in {tmp_path}. Fix: run it in the root of the repository\n")
    write(tmp_path, a="", b=cpu() + "def test_a(): assert False\n")
    status, out, err = run(tmp_path, "--suite", "stage-b-cpu")
    assert (status, out) == (2, "")
    assert err.startswith(f"mistakes in the registrations of tests: 1\n{E2E}/test_a.py:1: no suite runs this module.")


def gpu_machine(folder, count):
    """A PATH on which nvidia-smi shows some GPUs."""
    tool = folder / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: x)'\n" for i in range(count)))
    tool.chmod(0o755)
    return f"{tool.parent}:/usr/bin:/bin"


def test_a_suite_of_gpus_needs_them_and_takes_no_conftest(tmp_path):
    write(tmp_path, two='register_cuda_ci(est_time=30, suite="stage-c-2-gpu-h200")\ndef test_a(): pass\n')
    (tmp_path / "tests/conftest.py").write_text("import hypothesis_of_the_cpu_machine\n")
    path = gpu_machine(tmp_path, 2)
    arguments = ["--suite", "stage-c-2-gpu-h200"]
    status, out, _ = run(tmp_path, *arguments, PATH=path, CUDA_VISIBLE_DEVICES="0,1")
    assert status == 0
    assert rows(out)["two"][2:] == ["passed", "1 passed"]
    for chosen in ("", "1", "0,-1,1"):
        status, out, err = run(tmp_path, *arguments, PATH=path, CUDA_VISIBLE_DEVICES=chosen)
        assert (status, out) == (2, "")
        assert f"(CUDA_VISIBLE_DEVICES={chosen!r}). Fix: run it there, or run stage-a-cpu or stage-b-cpu here" in err
    status, _, err = run(tmp_path, *arguments, PATH=str(tmp_path))
    assert status == 2
    assert "needs 2 NVIDIA H200 of one host: 2 GPUs must be visible, nvidia-smi and CUDA_VISIBLE_DEVICES show 0" in err


def test_a_module_of_gpus_that_skips_everything_is_not_green(tmp_path):
    write(
        tmp_path,
        one='register_cuda_ci(est_time=30, suite="stage-b-1-gpu-h200")\n'
        "import pytest\npytestmark = pytest.mark.skipif(True, reason='needs a GPU')\ndef test_a(): pass\n",
    )
    status, out, _ = run(tmp_path, "--suite", "stage-b-1-gpu-h200", PATH=gpu_machine(tmp_path, 1))
    assert status == 1
    assert rows(out)["one"][2:] == ["nothing ran", "1 skipped in a suite of GPUs"]


def test_the_runner_itself_wants_nothing_but_the_standard_library():
    status, out, err = run(ROOT, "--list", python=(sys.executable, "-S"))
    assert status == 0, err
    files = re.findall(r"tests/\S+\.py", out)
    assert set(files) == {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
