import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from benchmarks import gpu_loop, learning, learning_curve, loop_hooks, loop_report


def written(folder: Path, *, events=(), metrics=()) -> Path:
    for name, rows in (("events", events), ("metrics", metrics)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def step_row(step, *, generate, train, whole, raw=None, **more):
    row = {"step": step, "perf/generate_time": generate, "perf/train_time": train, "perf/step_time": whole}
    row |= {"rollout/response_tokens": 1000.0, "bench/miles_s": generate - (raw or 0.0) - 0.25}
    if raw is not None:
        row |= {"bench/raw_s": raw, "bench/raw_tokens": 1000.0}
    return row | more


def test_the_parts_of_a_step_and_what_none_of_them_claims_add_up_to_it():
    rows = {
        2: {"perf/update_weights_time": 0.5},
        3: step_row(3, generate=6.0, train=4.0, whole=11.0) | {"perf/update_weights_time": 0.3},
        4: step_row(4, generate=6.2, train=4.0, whole=10.9),
    }
    steps = loop_report.whole_steps(rows, 3)
    table = loop_report.phase_table(rows, steps)
    assert steps == [3, 4]
    assert table["publish"] == {"median": 0.4, "least": 0.3, "most": 0.5, "repeats": 2}
    assert table["gaps"]["median"] == pytest.approx(0.45)
    parts = sum(table[name]["median"] for name in ("generate", "train", "publish", "gaps"))
    assert parts == pytest.approx(table["whole step"]["median"])


def test_a_step_without_the_publish_before_it_is_in_no_table():
    rows = {0: step_row(0, generate=1, train=1, whole=3), 1: step_row(1, generate=1, train=1, whole=3)}
    assert loop_report.whole_steps(rows, 0) == []


def test_the_share_of_the_bare_engine_compares_rates_of_the_same_step():
    rows = {1: step_row(1, generate=9.25, train=1, whole=9, raw=4.0), 2: step_row(2, generate=3, train=1, whole=5)}
    found = loop_report.generation(rows, [1, 2])
    assert found["raw_tokens_per_s"] == {"median": 250.0, "least": 250.0, "most": 250.0, "repeats": 1}
    assert found["share_of_raw"]["median"] == pytest.approx(4.0 / 5.0)
    assert found["share_of_raw_with_the_drivers_part"]["median"] == pytest.approx(4.0 / 5.25, abs=1e-4)
    assert loop_report.generation(rows, [2]) == {}


def test_the_bar_is_generation_at_95_percent_and_training_at_36_percent_of_the_peak():
    found = loop_report.bar(raw_s=9.5, flops=0.36 * 989e12 * 3)
    assert found == {"generate_s": 10.0, "train_s": 3.0, "allowance_s": 0.5, "whole_s": 13.5}


def test_the_start_is_told_from_the_command_to_the_end_of_the_first_train_step(tmp_path):
    events = [
        {"time": 101.0, "event": "run"},
        {"time": 160.0, "event": "started", "pids": {}},
        {"time": 162.0, "event": "phase", "phase": "generate", "step": 0},
        {"time": 169.0, "event": "phase", "phase": "train", "step": 0},
    ]
    metrics = [
        {"step": -1, "time": 161.5},
        {"step": 0, "time": 175.0, "perf/train_time": 6.0},
        {"step": 0, "time": 176.0, "perf/update_weights_time": 1.0},
    ]
    written(tmp_path, events=events, metrics=metrics)
    rows = loop_report.read_rows(tmp_path / "metrics.jsonl")
    found = loop_report.start_table(tmp_path, 100.0, rows)
    assert list(found.values()) == [1.0, 60.0, 61.5, 62.0, 69.0, 75.0]
    assert rows[0]["perf/update_weights_time"] == 1.0


def test_a_report_of_a_run_that_ended_early_has_what_there_is(tmp_path):
    written(tmp_path, events=[{"time": 1.0, "event": "run"}], metrics=[{"step": -1, "time": 2.0}])
    options = SimpleNamespace(model="tiny", prompts=4, samples=2, input_len=16, output_len=16, pairs=2)
    report = gpu_loop.report_of(tmp_path, 0.0, options, {"X": 3.0})
    assert report["start_s"] == {"settings read": 1.0, "first weights published and proved": 2.0}
    assert not report["phases_s"]
    assert "others" not in report
    assert "settings read" in loop_report.text_of(report)


def test_another_step_is_compared_by_name(tmp_path):
    metrics = [{"step": 0, "time": 1.0, "perf/update_weights_time": 0.5}, step_row(1, generate=2, train=1, whole=4)]
    written(tmp_path, events=[{"time": 1.0, "event": "run"}], metrics=[*metrics[:1], metrics[1] | {"time": 5.0}])
    options = SimpleNamespace(model="tiny", prompts=4, samples=2, input_len=16, output_len=16, pairs=0)
    report = gpu_loop.report_of(tmp_path, 0.0, options, {"other trainer": 10.0})
    assert report["others"] == {"other trainer": {"step_s": 10.0, "times_ours": 2.5}}
    assert "other trainer: 10.00 s a step, 2.50 times ours" in loop_report.text_of(report)


def test_against_takes_a_name_and_seconds():
    with pytest.raises(SystemExit, match="expected NAME=SECONDS"):
        gpu_loop.main(["--against", "TRL"])


def test_a_pass_over_the_bare_engine_sends_every_request_with_one_new_cache_key():
    seen = []

    async def generate(request):
        seen.append(await request.json())
        return web.json_response({"meta_info": {"completion_tokens": len(seen[-1]["input_ids"])}})

    async def go(status=200):
        app = web.Application()
        app.router.add_post("/generate", generate if status == 200 else refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await loop_hooks.raw_pass(
                f"http://127.0.0.1:{port}", [([1, 2, 3], {"sampling_seed": 1}), ([4, 5], {"sampling_seed": 2})]
            )
        finally:
            await runner.cleanup()

    async def refuse(request):
        return web.Response(status=400, text="no such thing")

    seconds, tokens = asyncio.run(go())
    first_key = {body["extra_key"] for body in seen}
    assert seconds > 0
    assert tokens == 5
    assert sorted(body["input_ids"] for body in seen) == [[1, 2, 3], [4, 5]]
    assert all(body["return_logprob"] for body in seen)
    seen.clear()
    asyncio.run(go())
    assert len(first_key) == 1
    assert first_key.isdisjoint({body["extra_key"] for body in seen})
    with pytest.raises(RuntimeError, match="answered 400: b'no such thing'"):
        asyncio.run(go(400))


def learning_run(folder: Path) -> Path:
    def evaluated(step, time, exact):
        return {"step": step, "time": time, "eval/exact": exact, "eval/lenient": exact + 0.05, "eval/sampled": exact / 2,
                "eval/exact/num_prompts": 256.0}  # fmt: skip

    metrics = [
        evaluated(-1, 160.0, 0.25),
        {"step": 0, "time": 170.0, "rollout/reward": 0.2},
        {"step": 1, "time": 175.0, "rollout/reward": 0.4},
        evaluated(1, 220.0, 0.5),
    ]
    return written(folder, events=[{"time": 100.0, "event": "run"}], metrics=metrics)


def test_a_learning_curve_counts_minutes_from_the_start_of_the_run_and_rises_in_points(tmp_path):
    report = learning.report_of(learning_run(tmp_path))
    first, last = report["evaluations"]
    assert (first["steps"], first["minutes"], first["train_reward"]) == (0, 1.0, None)
    assert (last["steps"], last["minutes"]) == (2, 2.0)
    assert last["train_reward"] == pytest.approx(0.3)
    assert report["rise_in_points"] == {"exact": 25.0, "lenient": 25.0, "sampled": 12.5}
    assert report["standard_error_in_points"] == 3.1
    assert "exact +25.0" in learning.text_of(report)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_curve_is_drawn_the_same_each_time(tmp_path, suffix):
    run = learning_run(tmp_path)
    pictures = [tmp_path / "a" / f"curve.{suffix}", tmp_path / f"b.{suffix}"]
    learning_curve.draw(pictures[0], [run])
    assert learning_curve.main([str(run), str(run), "--out", str(pictures[1])]) == 0
    learning_curve.draw(pictures[1], [run])
    contents = [picture.read_bytes() for picture in pictures]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 5000


def test_learning_without_data_says_what_to_give(capsys):
    with pytest.raises(SystemExit):
        learning.main([])
    assert "--data DIR is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_loop_is_measured_on_a_cpu(tmp_path, capsys):
    flags = ["--tiny", "--pairs", "2", "--steps", "2", "--json", str(tmp_path / "loop.json"), "--against", "X=60"]
    assert gpu_loop.main([*flags, "--out", str(tmp_path / "loop")]) == 0
    report = json.loads((tmp_path / "loop.json").read_text())
    assert report["generation"]["share_of_raw"]["repeats"] == 2
    assert report["phases_s"]["whole step"]["repeats"] == 2
    rows = loop_report.read_rows(tmp_path / "loop" / "run-0" / "metrics.jsonl")
    assert all(rows[step]["rollout/response_len/min"] == 16 for step in range(5))
    assert [("bench/raw_tokens" in rows[step]) for step in range(5)] == [False, True, True, False, False]
    assert rows[1]["bench/raw_tokens"] == rows[1]["rollout/response_tokens"]
    assert list(report["start_s"])[-1] == "first train step done"
    assert "whole step" in capsys.readouterr().out


@pytest.mark.slow
def test_the_learning_run_is_measured_and_drawn_on_a_cpu(tmp_path):
    flags = ["--tiny", "--json", str(tmp_path / "l.json"), "--plot", str(tmp_path / "l.svg")]
    assert learning.main([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    report = json.loads((tmp_path / "l.json").read_text())
    assert [point["steps"] for point in report["evaluations"]] == [0, 2, 4]
    assert (tmp_path / "l.svg").read_text().startswith("<?xml")
