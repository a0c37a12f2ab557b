import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from miles import launch
from miles.config.schema import RunConfig
from miles.errors import ConfigError, MilesError
from miles.utils.disk import free_space, write_whole
from miles.utils.run_folder import make_run_folder
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.events import EventLog, JsonLines
from miles.utils.tracking_utils.tracker import RunTracker


def rows(path):
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def test_a_row_that_does_not_fit_leaves_the_rows_before_it_and_says_how_much_is_free(small_disk):
    path = small_disk.folder / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 0})
    small_disk.fill()
    page = os.statvfs(small_disk.folder).f_frsize
    with pytest.raises(MilesError) as caught:
        lines.write({"step": 1, "text": "x" * 2 * page})  # the first page has room for its beginning
    told = str(caught.value)
    assert told.startswith(
        f"cannot write {path}: No space left on device; 0.0 MiB free on the file system of {path}\n"
    )
    assert "fix: free space there" in told
    assert rows(path) == [{"step": 0}]
    (small_disk.folder / "filler").unlink()
    lines.write({"step": 2})
    assert rows(path) == [{"step": 0}, {"step": 2}]


LIMITED = """
import resource, sys
from miles.errors import MilesError
from miles.utils.tracking_utils.events import JsonLines
lines = JsonLines(sys.argv[1])
lines.write({"step": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
try:
    lines.write({"step": 1, "text": "x" * 100})
except MilesError as e:
    print(e)
lines.write({"step": 2})
"""


def test_a_limit_in_the_middle_of_a_row_leaves_whole_rows_only(tmp_path):
    path = tmp_path / "events.jsonl"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"cannot write {path}: File too large" in done.stdout
    assert "ulimit -f" in done.stdout
    assert rows(path) == [{"step": 0}, {"step": 2}]


@pytest.mark.parametrize(
    ("left", "kept"),
    [(b'{"a":1}\n{"a":', [{"a": 1}]), (b'{"a":1}', []), (b'{"a":1}\n', [{"a": 1}]), (b"", []),
     (b'{"a":1}\n{"b":"' + b"x" * 200_000, [{"a": 1}]), (b"\n" + b"y" * 65_536, []), (b"y" * 65_537, [])],
)  # fmt: skip
def test_half_a_line_that_a_killed_run_left_is_gone_before_the_next_is_written(tmp_path, left, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(left)
    lines = JsonLines(path)
    lines.write({"a": 2})
    lines.close()
    assert [json.loads(line) for line in path.read_text().split("\n") if line] == [*kept, {"a": 2}]


def test_a_closed_log_and_a_folder_that_cannot_be_are_told_as_errors_of_ours(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log.close()
    with pytest.raises(MilesError, match=r"cannot write .*events\.jsonl: Bad file descriptor"):
        log.add("late")
    (tmp_path / "file").touch()
    with pytest.raises(MilesError, match=r"cannot write .*file/events\.jsonl: "):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_text_of_any_bytes_becomes_json(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.add("run", argv=[os.fsdecode(b"caf\xe9"), "caf\u00e9"])
    assert rows(tmp_path / "events.jsonl")[0]["argv"] == ["caf\udce9", "caf\u00e9"]


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_litter(small_disk):
    path = small_disk.folder / "curve.png"
    write_whole(path, "old")
    small_disk.fill(leaving=1)
    with pytest.raises(MilesError, match=r"cannot write .*curve\.png: No space left on device"):
        write_whole(path, b"x" * 100_000)
    assert path.read_text() == "old"
    assert sorted(p.name for p in small_disk.folder.iterdir()) == ["curve.png", "filler"]


def test_free_space_is_that_of_the_nearest_folder_there_is(tmp_path):
    assert free_space(tmp_path / "a" / "b").endswith(f"MiB free on the file system of {tmp_path}")


# ---- the tracker


def test_a_full_disk_stops_drawing_once_told_and_a_row_that_does_not_fit_ends_the_run(small_disk, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "tensorboard").symlink_to(small_disk.folder)
    tracker = RunTracker(run, "t", Console(), use_tensorboard=True)
    tracker._curve_path = small_disk.folder / "curve.png"
    small_disk.fill()
    for step in range(60):
        tracker.log(step, {f"name/{i}": 1.0 for i in range(20)} | {"rollout/reward": 1.0})
    tracker._draw()
    tracker.close()  # draws again
    told = capsys.readouterr().out.splitlines()
    assert (
        len([line for line in told if "TensorBoard gets nothing more from this run, and the run goes on" in line]) == 1
    )
    assert len([line for line in told if "curve.png stays as it is" in line and "No space left" in line]) == 1
    assert len(told) == 2
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == list(range(60))

    (small_disk.folder / "full").mkdir()
    with pytest.raises(MilesError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        RunTracker(small_disk.folder / "full", "t", Console(), use_tensorboard=False).log(0, {"a": 1.0})


def test_without_a_folder_for_tensorboard_a_run_goes_on(tmp_path, capsys):
    (tmp_path / "tensorboard").touch()
    tracker = RunTracker(tmp_path, "t", Console(), use_tensorboard=True)
    tracker.log(0, {"a": 1.0})
    tracker.close()
    assert "TensorBoard gets nothing from this run, and the run goes on: cannot write" in capsys.readouterr().out
    assert [row["a"] for row in rows(tmp_path / "metrics.jsonl")] == [1.0]


# ---- the end of a run


def run_with(small_disk, monkeypatch, build, loop):
    monkeypatch.setattr(launch, "build", asynccontextmanager(build))
    config = RunConfig.model_validate({"run": {"dir": str(small_disk.folder / "run")}})
    return launch.run_to_end(config, loop)


def test_a_run_whose_disk_fills_up_ends_with_its_reason_and_no_traceback(small_disk, monkeypatch, capsys):
    async def build(config, run_dir, console, events):
        tracker = RunTracker(run_dir, "t", console, use_tensorboard=False)
        yield tracker
        tracker.close()

    async def loop(tracker):
        small_disk.fill()
        tracker.log(1, {f"name/{i}": 0.5 for i in range(2000)})

    assert run_with(small_disk, monkeypatch, build, loop) == 1
    told = capsys.readouterr().err
    path = f"{small_disk.folder}/run/metrics.jsonl"
    assert told.startswith(f"error: cannot write {path}: No space left on device; 0.0 MiB free on the file system of")
    assert "no traceback there: [Errno 28]" in told
    assert "Traceback" not in told
    assert rows(small_disk.folder / "run" / "metrics.jsonl") == []


def test_a_run_whose_end_cannot_be_noted_says_so(small_disk, monkeypatch, capsys):
    async def build(config, run_dir, console, events):
        small_disk.fill()
        room = os.statvfs(small_disk.folder).f_frsize - os.fstat(events._lines._fd).st_size
        events.add("fills its page", text="x" * (room - 80))
        yield None

    async def loop(run):
        pass

    assert run_with(small_disk, monkeypatch, build, loop) == 1
    assert "error: how this run ended could not be noted: cannot write" in capsys.readouterr().err


# ---- the run folder


def test_a_run_folder_on_a_read_only_file_system_is_refused_with_a_way_out(small_disk):
    (small_disk.folder / "old").mkdir()
    small_disk.remount("ro")
    for folder in (small_disk.folder / "new" / "run", small_disk.folder / "old"):
        with pytest.raises(
            ConfigError, match=rf"run\.dir: cannot write the run folder {folder}: Read-only file system"
        ) as e:
            make_run_folder("x", str(folder))
        assert "fix: choose a folder on a file system that is not read-only: --run-dir FOLDER" in str(e.value)
    small_disk.remount("rw")


def test_a_run_folder_on_a_full_disk_is_refused_with_what_is_free(small_disk):
    small_disk.fill()
    with pytest.raises(ConfigError, match=r"run: No space left on device; 0\.0 MiB free on the file system of"):
        make_run_folder("x", str(small_disk.folder / "run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"Permission denied.*\n.*change its permissions: --run-dir FOLDER"):
        make_run_folder("x", str(tmp_path))


def test_a_run_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir: cannot write the run folder .*Not a directory"):
        make_run_folder("x", str(tmp_path / "file" / "run"))


def test_folders_named_by_the_clock_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")  # two runs of a second, or a clock set back
    made = [make_run_folder("x", None) for _ in range(3)]
    assert [path.name for path in made] == ["x-20260101-000000", "x-20260101-000000-2", "x-20260101-000000-3"]
    assert all([p.name for p in path.iterdir()] == ["logs"] for path in made)
