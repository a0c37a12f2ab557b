"""Trainer ranks in processes of their own: one process imports torch, and forks the ranks of one case after another."""

# python -m tests.fast.fsdp.ranks FOLDER    plays the cases of FOLDER/cases.json; each writes into FOLDER/NAME

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from miles.backends.fsdp_utils.model import load_policy
from miles.backends.fsdp_utils.worker import FsdpTrainWorker
from tests.fast.fsdp.support import make_batch, make_config, make_samples, make_split_samples, with_log_probs

ROOT = Path(__file__).resolve().parents[3]


def few_trainable() -> list[dict]:
    """Three trajectories of which one is trained on: of several ranks all but one have nothing to do."""
    samples = make_samples(3, seed=1)
    for sample in samples[:2]:
        sample["loss_mask"] = [0.0] * len(sample["loss_mask"])
    return samples


class Rank:
    """One rank of a case."""

    def __init__(self, case: dict, rank: int, out: Path) -> None:
        self.case, self.rank, self.out = case, rank, out
        self._opened = 0

    @contextlib.contextmanager
    def worker(self):
        self._opened += 1
        worker = FsdpTrainWorker(
            make_config(Path(self.case["model"]), **json.loads(json.dumps(self.case["settings"]))),
            rank=self.rank,
            world_size=self.case["ranks"],
            init_method=f"file://{self.out}/store-{self._opened}",
            total_optimizer_steps=20,
            threads=self.case.get("threads", 1),
        )
        try:
            yield worker
        finally:
            worker.close()

    def note(self, name: str, metrics: dict) -> None:
        kept = {k: v for k, v in metrics.items() if k.startswith("train/")}
        (self.out / f"{name}-rank{self.rank}.json").write_text(json.dumps(kept))


def trains(rank: Rank) -> None:
    """A step with idle ranks, a step with uneven shares, and what both left."""
    with rank.worker() as worker:
        for name, samples in (("idle", few_trainable()), ("uneven", make_samples(9))):
            rank.note(name, worker.train(make_batch(samples), 0))
            worker.save(f"{rank.out}/{name}")


def resumes(rank: Rank) -> None:
    """Three steps, and the third again after a load of what the second left."""
    with rank.worker() as worker:
        for step in (0, 1):
            worker.train(make_batch(make_samples(seed=step)), step)
        torch.rand(3 + rank.rank)
        worker.save(f"{rank.out}/second")
        rank.note("whole", worker.train(make_batch(make_samples(seed=2)), 2))
        worker.save(f"{rank.out}/third")
    with rank.worker() as worker:
        worker.load(f"{rank.out}/second")
        rank.note("resumed", worker.train(make_batch(make_samples(seed=2)), 2))
        worker.save(f"{rank.out}/third-again")


def loads(rank: Rank) -> None:
    """Load what another case left, and save it again."""
    with rank.worker() as worker:
        worker.load(rank.case["load"])
        worker.save(f"{rank.out}/again")


def splits(rank: Rank) -> None:
    """A step on trajectories that several micro-batches hold, off the policy that sampled."""
    with rank.worker() as worker:
        samples = make_split_samples()
        scores = worker.score([s["tokens"] for s in samples], 1.0)
        shifted = [[x - 0.3 + 0.1 * (t % 5) for t, x in enumerate(row)] for row in scores]
        rank.note("split", worker.train(make_batch(with_log_probs(samples, shifted)), 0))
        worker.save(f"{rank.out}/split")


STORIES = {"trains": trains, "resumes": resumes, "loads": loads, "splits": splits}


def play(case: dict, out: Path) -> None:
    """Fork the ranks of a case and wait for them; the first that fails ends the others."""
    pids = {}
    for number in range(case["ranks"]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                STORIES[case["story"]](Rank(case, number, out))
                status = 0
            except BaseException:
                traceback.print_exc()
            # A gloo thread may still free a tensor, for which it needs the interpreter, while that is being taken down: torch
            # then aborts ("terminate called without an active exception"). All is written here.
            os._exit(status)
        pids[pid] = number
    while pids:
        pid, status = os.wait()
        number = pids.pop(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"rank {number} of {case['name']} ended with status {status}")


def play_all(folder: Path, cases: list[dict]) -> Path:
    """Play the cases in a process of their own; returns `folder`, which has a folder for each."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fast.fsdp.ranks", str(folder)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return folder


if __name__ == "__main__":
    to_play = json.loads((Path(sys.argv[1]) / "cases.json").read_text())
    # What a first load imports takes longer than a case; ranks inherit it. One thread leaves no pool that a fork would break.
    torch.set_num_threads(1)
    load_policy(to_play[0]["model"])
    for each in to_play:
        place = Path(sys.argv[1]) / each["name"]
        place.mkdir()
        play(each, place)
