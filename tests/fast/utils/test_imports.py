import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.utils.imports import without_collection

ROOT = Path(__file__).parents[3]
MAIN = """
import gc, multiprocessing, sys
from miles.utils.imports import without_collection_until_run

if __name__ == "__mp_main__":
    without_collection_until_run()
if __name__ == "__main__":
    import target
    process = multiprocessing.get_context("spawn").Process(target=target.run)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
TARGET = """
import gc
print(f"imported, collects: {gc.isenabled()}", flush=True)

def run():
    print(f"runs, collects: {gc.isenabled()}, set aside: {gc.get_freeze_count() > 0}", flush=True)
"""


@pytest.fixture
def as_before():
    yield
    gc.unfreeze()


def test_nothing_is_collected_inside_and_what_is_there_is_set_aside(as_before):
    before = gc.get_freeze_count()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_who_collects_nothing_already_goes_on_so():
    gc.disable()
    try:
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_spawned_process_collects_from_where_it_runs(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "started.py").write_text(MAIN)
    (tmp_path / "target.py").write_text(TARGET)
    command = [sys.executable, "-m", "package.started"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        "imported, collects: True",
        "imported, collects: False",
        "runs, collects: True, set aside: True",
    ]
