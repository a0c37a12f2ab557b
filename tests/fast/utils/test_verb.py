import os
import signal
import subprocess
import sys
import time

import pytest

from miles.errors import ConfigError, Issue, MilesError
from miles.utils.verb import run_verb


def read(argv):
    if "wrong" in argv:
        raise ConfigError([Issue("a.b", "is wrong", "mend it")])
    return list(argv)


def ends(with_what):
    def work(options):
        if isinstance(with_what, BaseException):
            raise with_what
        return with_what

    return work


@pytest.mark.parametrize(
    ("argv", "work", "status", "told"),
    [
        (["check"], ends(0), 0, ""),
        (["check"], ends(7), 7, ""),
        (["chekc"], ends(0), 2, "there is no 'chekc' here\nusage\n"),
        ([], ends(0), 2, "usage\n"),
        (["check", "wrong"], ends(0), 2, "a.b: is wrong"),
        (["check"], ends(MilesError("lost")), 1, "lost\n    left in x\n"),
        (["check"], ends(ConfigError([Issue("a.b", "is wrong", "mend it")])), 2, "mend it"),
        (["check"], ends(KeyboardInterrupt()), 130, "interrupted; every process has ended\n    left in x\n"),
    ],
)
def test_every_end_has_its_status_and_says_why(argv, work, status, told, capsys):
    found = run_verb(argv, read, work, help_text="help", word="check", usage="usage", left=lambda options: "left in x")
    out = capsys.readouterr()
    assert (found, out.out) == (status, "")
    assert told in out.err
    assert bool(out.err) == bool(told)


@pytest.mark.parametrize("argv", [["-h"], ["--help"], ["check", "--help"]])
def test_help_goes_to_stdout(argv, capsys):
    assert run_verb(argv, read, ends(1), help_text="help\n", word="check") == 0
    assert capsys.readouterr().out == "help\n"


def test_the_first_word_is_not_an_option_of_the_verb():
    seen = []
    assert run_verb(["check", "x"], read, lambda options: seen.append(options) or 0, help_text="", word="check") == 0
    assert run_verb(["x"], read, lambda options: seen.append(options) or 0, help_text="") == 0
    assert seen == [["x"], ["x"]]


def test_sigterm_unwinds_the_stack(tmp_path):
    code = f"""
import sys, time
from miles.utils.verb import run_verb

def work(options):
    try:
        print("works", flush=True)
        time.sleep(60)
    finally:
        open({str(tmp_path / "cleaned")!r}, "w").close()

sys.exit(run_verb([], list, work, help_text=""))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline() == b"works\n"
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 20
    assert (tmp_path / "cleaned").exists()
