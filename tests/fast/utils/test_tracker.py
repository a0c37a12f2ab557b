import gc
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.utils.tracking_utils import tracker as tracker_module
from miles.utils.tracking_utils.console import Console, duration
from miles.utils.tracking_utils.tracker import RunTracker

ROOT = Path(__file__).parents[3]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# Case H09: each step is on disk before the next, and nothing has to be closed for that.
def test_each_step_is_in_every_sink_before_the_next_even_if_the_run_dies(tmp_path):
    tracker = RunTracker(tmp_path, "t", Console(), use_tensorboard=True)
    for step in range(3):
        tracker.log(step, {"rollout/reward": step / 2})
        assert rows(tmp_path / "metrics.jsonl")[-1]["step"] == step
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("rollout/reward")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    tracker.close()
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


DIES = """
import os, pathlib, signal, sys
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.tracker import RunTracker
tracker = RunTracker(pathlib.Path(sys.argv[1]), "t", Console(), use_tensorboard=True)
for step in range(3):
    tracker.log(step, {"rollout/reward": step / 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


# Case H09: killed right after the third step.
def test_the_last_step_of_a_killed_run_is_in_every_sink(tmp_path):
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("rollout/reward")] == [0, 1, 2]
    assert (tmp_path / "curve.png").exists()


# Case H06: the JSON stays valid.
def test_values_that_are_not_finite_become_null_and_the_json_stays_valid(tmp_path):
    tracker = RunTracker(tmp_path, "t", Console(), use_tensorboard=True)
    tracker.log(0, {"a": math.nan, "b": math.inf, "c": 1.0})
    tracker.close()
    row = rows(tmp_path / "metrics.jsonl")[0]
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)


def test_the_curve_is_there_from_the_first_reward_on(tmp_path):
    tracker = RunTracker(tmp_path, "t", Console(), use_tensorboard=False)
    tracker.log(-1, {"perf/update_weights_time": 0.1})
    assert not (tmp_path / "curve.png").exists()
    tracker.log(0, {"rollout/reward": 0.5})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    tracker.close()


def test_the_console_shows_step_reward_lengths_speed_and_time_left(capsys, tmp_path):
    console = Console()
    console.start(range(4))
    console.metrics(0, {"rollout/reward": 0.5, "rollout/response_len/mean": 9.25, "perf/train_time": 1.0,
                        "rollout/response_tokens_per_s": 1234.0})  # fmt: skip
    line = capsys.readouterr().out
    for part in ("step 1/4", "reward 0.500", "len 9.2", "tok/s 1234", "left 0:"):
        assert part in line


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (0, 61, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_a_run_resumed_in_its_folder_goes_on_with_its_rows_and_curve(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(tracker_module, "draw_curve", lambda path, title, series: drawn.update(series))
    tracker = RunTracker(tmp_path, "t", Console(), use_tensorboard=False)
    for step in range(4):
        tracker.log(step, {"rollout/reward": step / 8, "eval/a": math.nan if step == 1 else 0.5, "eval/a/b": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rollout/rew')  # killed here; the checkpoint was after step 1
    resumed = RunTracker(tmp_path, "t", Console(), use_tensorboard=False)
    resumed.log(2, {"rollout/reward": 0.75})
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 2]
    resumed.close()
    assert drawn == {"rollout/reward": [(0, 0.0), (1, 0.125), (2, 0.75)], "eval/a": [(0, 0.5), (2, 0.5)]}


def test_drawings_do_not_pile_up_in_memory(tmp_path):
    for _ in range(10):
        tracker_module.draw_curve(tmp_path / "curve.png", "t", {"rollout/reward": [(0, 0.5), (1, 0.6)]})
    from matplotlib.figure import Figure

    assert sum(isinstance(found, Figure) for found in gc.get_objects()) <= 2
