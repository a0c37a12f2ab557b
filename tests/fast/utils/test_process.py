import os
import subprocess
import sys
import time

import pytest

from miles.errors import EngineError
from miles.utils.process import ServerProcess

SERVER = """
import argparse, sys, time
from miles.utils.process import die_with_parent, report_ready, watch_stdin
p = argparse.ArgumentParser(); p.add_argument("--ready-fd", type=int); a = p.parse_args()
die_with_parent(); watch_stdin()
print("hello from the log", flush=True)
{body}
time.sleep(60)
"""


def server(tmp_path, body):
    return ServerProcess("engine-7", [sys.executable, "-c", SERVER.format(body=body)], tmp_path / "s.log")


def gone(pid):
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
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
s = ServerProcess("e", [sys.executable, "-c", {SERVER.format(body='report_ready(a.ready_fd, {"port": 1})')!r}], {str(tmp_path / "s.log")!r})
s.wait_ready(20)
print(s.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert gone(pid)
