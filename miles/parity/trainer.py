"""One trainer: a process that loads the model as a run's trainer does, scores sequences, and ends.

python -m miles.parity.trainer FOLDER    reads config.yaml and task.json there, writes result.json
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.config.dump import dump, undump
from miles.config.resources import machine_gpus, resolved_device, resolved_threads
from miles.config.schema import RunConfig
from miles.errors import MilesError
from miles.utils.process import die_with_parent, last_lines

CONFIG, TASK, RESULT = "config.yaml", "task.json", "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a trainer says of sequences."""

    log_probs: list[list[float]]
    """Of tokens 1 to T - 1 of each sequence, in nats."""
    device: str
    """What it computed on."""


def score_by_trainer(
    config: RunConfig, sequences: Sequence[Sequence[int]], *, folder: Path, timeout_s: float
) -> Scored:
    """Log-probs of `sequences` under the rollout's temperature, by the trainer of a run with `config`.

    Works in `folder`, which is made. Raises MilesError, with the end of its log, when the trainer fails or takes longer.
    """
    folder.mkdir()
    (folder / CONFIG).write_text(dump(_policy_only(config)), encoding="utf-8")
    (folder / TASK).write_text(json.dumps({"sequences": [list(s) for s in sequences]}))
    environment = {**os.environ, "PYTHONPATH": _python_path()}
    if resolved_device(config) == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(machine_gpus()[:1])
    log_path = folder / "log.txt"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "miles.parity.trainer", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise MilesError(
            f"the trainer was not done after {timeout_s:g} s; the end of {log_path}:\n{last_lines(log_path)}"
            "\n    fix: a larger --timeout"
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return _result(folder, log_path)


def _result(folder: Path, log_path: Path) -> Scored:
    try:
        found = json.loads((folder / RESULT).read_text())
    except FileNotFoundError:
        raise MilesError(f"the trainer failed; the end of {log_path}:\n{last_lines(log_path)}") from None
    if "error" in found:
        raise MilesError(found["error"])
    return Scored(log_probs=found["log_probs"], device=found["device"])


def _policy_only(config: RunConfig) -> RunConfig:
    """The same model in the same numbers, without what other parts of a loss would load: a reference, a critic."""
    data = config.model_dump(mode="json")
    return RunConfig.model_validate({**data, "algorithm": {}, "correction": {}, "critic": {}})


def _python_path() -> str:
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def main(folder: str) -> int:
    """Score the sequences of FOLDER/task.json; returns the exit status."""
    import torch

    from miles.backends.fsdp_utils.worker import FsdpTrainWorker

    work = Path(folder)
    config = undump((work / CONFIG).read_text(encoding="utf-8"))
    try:
        worker = FsdpTrainWorker(
            config,
            rank=0,
            world_size=1,
            init_method=f"file://{work}/rendezvous",
            total_optimizer_steps=1,
            threads=resolved_threads(config),
        )
        log_probs = worker.score(json.loads((work / TASK).read_text())["sequences"], config.rollout.temperature)
        worker.close()
    except MilesError as error:
        (work / RESULT).write_text(json.dumps({"error": str(error)}))
        return 1
    device = torch.cuda.get_device_name() if resolved_device(config) == "cuda" else "CPU"
    (work / RESULT).write_text(json.dumps({"log_probs": log_probs, "device": device}))
    return 0


if __name__ == "__main__":
    die_with_parent()
    raise SystemExit(main(sys.argv[1]))
