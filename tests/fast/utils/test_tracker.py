import json
import math

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.utils.tracking_utils.console import Console, duration
from miles.utils.tracking_utils.tracker import RunTracker


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_in_every_sink_before_the_next_even_if_the_run_dies(tmp_path):
    tracker = RunTracker(tmp_path, "t", Console(), use_tensorboard=True)
    for step in range(3):
        tracker.log(step, {"rollout/reward": step / 2})
        assert rows(tmp_path / "metrics.jsonl")[-1]["step"] == step
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("rollout/reward")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    tracker.close()
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_values_that_are_not_finite_become_null_and_the_json_stays_valid(tmp_path):
    tracker = RunTracker(tmp_path, "t", Console(), use_tensorboard=True)
    tracker.log(0, {"a": math.nan, "b": math.inf, "c": 1.0})
    tracker.close()
    row = rows(tmp_path / "metrics.jsonl")[0]
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)


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
