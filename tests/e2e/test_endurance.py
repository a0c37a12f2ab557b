"""Two hundred steps of the quickstart's size while its engine is killed again and again."""

import statistics
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from examples.quickstart import make_task
from examples.quickstart.run import RECIPES, latest_hf
from tests.ci.register import register_cpu_ci
from tests.e2e.kill_matrix import COMMAND_LINES, victim
from tests.fast.ray.conftest import TrainProcess, metrics

register_cpu_ci(est_time=1100, suite="stage-b-cpu", labels=["faults"], nightly=True)

STEPS = 200
KILL_EVERY = 10
WARM_STEPS = 50
PROMPTS = 32


def warm_model(task: Path, out: Path) -> Path:
    make_task.main(["--out", str(task), "--seed", "0"])
    ended = TrainProcess(
        str(RECIPES / "quickstart-sft.yaml"), "--run-dir", str(out),
        "--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "sft.jsonl"),
    ).end()  # fmt: skip
    assert ended.status == 0, ended.err
    return latest_hf(out / "checkpoints")


def long_run(task: Path, model: Path, run_dir: Path, *, kill_every: int | None) -> dict[str, list[tuple[int, int]]]:
    """Run to the end; returns (step, resident bytes) of every process, by its name, or for engines name and pid."""
    train = TrainProcess(
        str(RECIPES / "quickstart-grpo.yaml"), "--run-dir", str(run_dir),
        "--hf-checkpoint", str(model), "--prompt-data", str(task / "train.jsonl"),
        "--num-rollout", str(STEPS), "--save-interval", "100", "--eval-interval", "null",
    )  # fmt: skip
    resident: dict[str, list[tuple[int, int]]] = defaultdict(list)
    seen = -1
    while train.process.poll() is None:
        done = (
            len([row for row in metrics(run_dir) if "train/loss" in row])
            if (run_dir / "metrics.jsonl").exists()
            else 0
        )
        if done > seen and done:
            seen = done
            for name in COMMAND_LINES:
                try:
                    process = victim(train, name)
                    key = f"{name} {process.pid}" if name.startswith("engine's server") else name
                    resident[key].append((done, process.memory_info().rss))
                    if kill_every and name == "engine's server" and done % kill_every == 0 and done < STEPS:
                        process.kill()
                except (ValueError, psutil.NoSuchProcess):
                    continue  # it is being started again
        time.sleep(0.05)
    ended = train.end()
    assert ended.status == 0, ended.err
    assert ended.left_behind == []
    return resident


def growth(resident: dict[str, list[tuple[int, int]]]) -> dict[str, float]:
    """Resident memory of each process that lives through the run: the last 30 steps over the 30 after the warm ones."""
    found = {}
    for name, sizes in resident.items():
        early = [size for step, size in sizes if WARM_STEPS < step <= WARM_STEPS + 30]
        late = [size for step, size in sizes if step > STEPS - 30]
        if early and late:
            found[name] = statistics.median(late) / statistics.median(early)
    return found


@pytest.mark.slow
def test_an_engine_killed_every_ten_steps_changes_neither_reward_nor_account_nor_memory(tmp_path):
    task = tmp_path / "task"
    model = warm_model(task, tmp_path / "sft")
    long_run(task, model, tmp_path / "plain", kill_every=None)
    resident = long_run(task, model, tmp_path / "killed", kill_every=KILL_EVERY)

    plain, killed = ([r for r in metrics(tmp_path / name) if "train/loss" in r] for name in ("plain", "killed"))
    assert [row["step"] for row in killed] == [row["step"] for row in plain] == list(range(STEPS))
    assert killed[-1]["ledger/trained"] == (STEPS - 1) * PROMPTS
    assert all(row["ledger/dropped"] == row["ledger/failed"] == 0 for row in killed)
    restarts = max(row.get("fault_tolerance/engine_restarts", 0) for row in metrics(tmp_path / "killed"))
    assert restarts == STEPS // KILL_EVERY - 1
    last = [statistics.mean(row["rollout/reward"] for row in rows[-50:]) for rows in (plain, killed)]
    grown = growth(resident)
    print(f"reward of the last 50 steps: {last[0]:.3f} without kills, {last[1]:.3f} with; memory: {grown}")
    assert abs(last[0] - last[1]) < 0.03
    assert {name: factor for name, factor in grown.items() if factor > 1.05} == {}
    assert len(grown) >= 6
