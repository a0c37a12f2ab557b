import os
import subprocess
import sys

import pytest

from miles.utils.tracking_utils.console import Console

RUN = """
import sys
from miles.utils.tracking_utils.console import Console
console = Console()
for i in range(3):
    console.say(f"step {i} of the run")
console.error("the end")
sys.exit(7)
"""


def run(stdout, stderr=subprocess.PIPE, **env):
    return subprocess.run([sys.executable, "-c", RUN], stdout=stdout, stderr=stderr, env={**os.environ, **env})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_output_to_a_full_disk_is_told_once_and_the_run_goes_on_to_its_own_end():
    with open("/dev/full", "w") as full:
        done = run(full)
        assert done.returncode == 7
        assert done.stderr.decode().splitlines() == [
            "standard output cannot be written (No space left on device), so no more is written there; the run goes on",
            "error: the end",
        ]
        both = run(full, full)
        assert both.returncode == 7


def test_a_reader_that_leaves_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    done = run(writer)
    os.close(writer)
    assert done.returncode == 7
    assert done.stderr.decode().splitlines() == [
        "standard output cannot be written (Broken pipe), so no more is written there; the run goes on",
        "error: the end",
    ]


def test_a_terminal_that_is_not_utf8_shows_what_it_can(tmp_path):
    code = f"from {Console.__module__} import Console; Console().say('caf\\u00e9 \\udcff')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stdout) == (0, b"caf\\xe9 \\udcff\n")
