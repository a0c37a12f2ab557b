import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from miles.config.reward_types import REWARD_TYPES, needs_label
from miles.config.walk import leaves
from miles.reward_check.options import OWN

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "user-guide" / "rewards.md").read_text(encoding="utf-8")


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def cells_below(heading):
    """Rows of the table whose first column is called `heading`."""
    table = PAGE[PAGE.index(f"\n\n| {heading} |") + 2 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's module, and `miles` as a command."""
    folder = tmp_path_factory.mktemp("page")
    module, _ = blocks("python")
    (folder / "my_rewards.py").write_text(module)
    (folder / "bin").mkdir()
    command = folder / "bin" / "miles"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m miles.cli "$@"\n')
    command.chmod(0o755)
    return folder


def run_shell(folder, script):
    env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(["sh", "-e", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_the_helpers_do_what_the_page_says():
    _, helpers = blocks("python")
    exec(compile(helpers, "rewards.md", "exec"), {})


def test_the_commands_of_the_page_print_what_it_shows(folder):
    first, second = blocks("sh")
    done = run_shell(folder, first)
    assert done.returncode == 0, done.stderr
    (shown,) = [block for block in blocks("") if block.startswith("rows.jsonl")]
    without_speed = [
        [line for line in text.splitlines() if not line.startswith("  speed ")] for text in (done.stdout, shown)
    ]
    assert without_speed[0] == without_speed[1]
    done = run_shell(folder, second)
    assert done.returncode == 0, done.stderr
    assert "graded by --custom-rm-path my_rewards.graded\n" in done.stdout
    assert "graded by --custom-rm-path my_rewards.best_of_group --group-rm\n" in done.stdout
    assert done.stdout.count("errors    0") == 2


def test_the_table_has_every_type_in_the_codes_order_and_says_whether_it_needs_a_label():
    rows = cells_below("`--rm-type`")
    assert [row[0].strip("`") for row in rows] == list(REWARD_TYPES)
    assert {row[0].strip("`") for row in rows if row[2] == "needed"} == {n for n in REWARD_TYPES if needs_label(n)}


def test_flags_and_settings_of_the_page_exist():
    known = {flag for leaf in leaves() for flag in (*leaf.flags, *leaf.inverted)} | set(OWN)
    assert set(re.findall(r"--[a-z][a-z0-9.-]+[a-z]", PAGE)) <= known
    paths = {leaf.path for leaf in leaves()}
    assert set(re.findall(r"`(reward\.[a-z_]+)`", PAGE)) <= paths


def test_links_of_the_page_lead_somewhere():
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", PAGE, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        if target.startswith("#"):
            assert target[1:] in headings
        elif not target.startswith("https://"):
            assert (ROOT / "docs" / "user-guide" / target).is_file(), target


def test_metrics_of_the_page_are_the_codes():
    code = "".join(path.read_text() for path in (ROOT / "miles" / "rollout" / "rm_hub").glob("*.py"))
    named = set(re.findall(r"`(rollout/reward_\w+)", PAGE))
    assert named
    assert named == set(re.findall(r'"(rollout/reward_\w+)', code))
