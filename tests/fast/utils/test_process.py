import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from miles.errors import EngineError, MilesError
from miles.utils import process as process_module
from miles.utils.process import ServerProcess, last_lines

SERVER = """
import argparse, os, sys, time
from miles.utils.process import die_with_parent, report_ready, watch_stdin
p = argparse.ArgumentParser(); p.add_argument("--ready-fd", type=int); a = p.parse_args()
die_with_parent(); {watch}
print("hello from the log", flush=True)
{body}
time.sleep(60)
"""


def server(tmp_path, body, watch="watch_stdin()"):
    return ServerProcess("engine-7", [sys.executable, "-c", SERVER.format(body=body, watch=watch)], tmp_path / "s.log")


def gone(pid):
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:  # dead; whether init reaps it is not ours
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_server_reports_its_facts_and_ends_when_told(tmp_path):
    process = server(tmp_path, 'report_ready(a.ready_fd, {"port": 1234})')
    assert process.wait_ready(20) == {"port": 1234}
    assert process.exit_code() is None
    process.stop()
    assert process.exit_code() is not None


def test_a_server_that_ends_early_is_an_error_with_its_last_lines_and_log(tmp_path):
    process = server(tmp_path, "sys.exit(3)")
    with pytest.raises(
        EngineError, match=r"engine-7: ended before it was ready \(exit code 3\)(.|\n)*hello from the log(.|\n)*log: "
    ):
        process.wait_ready(20)


def test_a_server_that_reports_an_error_is_stopped_with_that_error(tmp_path):
    process = server(tmp_path, 'report_ready(a.ready_fd, {"error": "port 80 is in use"})')
    with pytest.raises(EngineError, match="port 80 is in use"):
        process.wait_ready(20)
    assert process.exit_code() is not None


def test_a_server_that_says_nothing_is_stopped_at_the_deadline(tmp_path):
    process = server(tmp_path, "")
    with pytest.raises(EngineError, match="not ready after 1 s"):
        process.wait_ready(1)
    assert process.exit_code() is not None


def test_a_server_dies_when_its_owner_is_killed(tmp_path):
    owner = f"""
import sys, time
from miles.utils.process import ServerProcess
s = ServerProcess("e", [sys.executable, "-c", {SERVER.format(watch="watch_stdin()", body='report_ready(a.ready_fd, {"port": 1})')!r}], {str(tmp_path / "s.log")!r})
s.wait_ready(20)
print(s.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert gone(pid)


def test_a_server_that_ignores_the_request_to_end_is_killed_after_its_grace(tmp_path):
    ignoring = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); report_ready(a.ready_fd, {"port": 1})'
    process = server(tmp_path, ignoring, watch='watch_stdin(lambda: print("told", flush=True))')
    process.wait_ready(20)
    started = time.monotonic()
    process.stop(grace_s=0.4)
    assert 0.4 <= time.monotonic() - started < 3
    assert process.exit_code() == -signal.SIGKILL
    assert "told" in (tmp_path / "s.log").read_text()
    process.stop()


def test_a_stopped_server_can_be_ended(tmp_path):
    process = server(tmp_path, 'report_ready(a.ready_fd, {"port": 1})')
    process.wait_ready(20)
    os.kill(process.pid, signal.SIGSTOP)
    process.stop(grace_s=0.2)
    assert process.exit_code() is not None


FORKS = """
import signal
if (child := os.fork()) == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
"""


FORKS_AWAY = """
told, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    print("child", os.getpid(), flush=True)
    os.write(tell, b"!")
    time.sleep(60)
os.read(told, 1)
os._exit(3)
"""


@pytest.mark.parametrize("how", ["told", "killed"])
def test_the_children_of_a_server_end_with_it(tmp_path, how):
    process = server(tmp_path, FORKS + 'report_ready(a.ready_fd, {"child": child})')
    child = process.wait_ready(20)["child"]
    if how == "killed":
        os.kill(process.pid, signal.SIGKILL)
        while process.exit_code() is None:
            time.sleep(0.01)
    process.stop()
    assert gone(child)


def test_a_server_that_ends_early_is_noticed_though_a_child_of_another_session_holds_the_pipe(tmp_path):
    process = server(tmp_path, FORKS_AWAY)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"ended before it was ready \(exit code 3\)"):
        process.wait_ready(30)
    assert time.monotonic() - started < 10
    child = int(re.search(r"child (\d+)", (tmp_path / "s.log").read_text())[1])
    os.kill(child, signal.SIGKILL)
    assert gone(child)


def test_what_a_server_said_just_before_it_ended_is_not_lost(tmp_path):
    process = server(tmp_path, 'report_ready(a.ready_fd, {"error": "no such model"}); os._exit(1)')
    while process.exit_code() is None:
        time.sleep(0.01)
    with pytest.raises(EngineError, match="no such model"):
        process.wait_ready(20)


def test_a_server_that_closes_its_side_without_a_word_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "_EXIT_S", 0.2)
    process = server(tmp_path, "os.close(a.ready_fd)")
    with pytest.raises(EngineError, match="closed its side before it was ready"):
        process.wait_ready(20)
    assert process.exit_code() is not None


def test_a_command_that_is_not_there_and_a_log_that_cannot_be_are_told(tmp_path):
    with pytest.raises(EngineError, match=r"engine-7: cannot be started: .*check that /no/such/program is there"):
        ServerProcess("engine-7", ["/no/such/program"], tmp_path / "s.log")
    with pytest.raises(MilesError, match=r"cannot write .*s\.log/s\.log"):
        ServerProcess("engine-7", [sys.executable], tmp_path / "s.log" / "s.log")


def test_the_end_of_a_log_is_read_whatever_its_size(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1_000_000 + b"\n" + b"".join(b"line %d\n" % i for i in range(100)))
    assert last_lines(log, 2) == "line 98\nline 99"
    assert last_lines(tmp_path / "absent") == ""
