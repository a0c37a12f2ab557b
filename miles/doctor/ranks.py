"""Trainer ranks: one process imports torch once, and forks the ranks of one number of ranks after another.

python -m miles.doctor.ranks FOLDER    reads config.yaml and task.json there, writes result.json
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from miles.backends.fsdp_utils.worker import FsdpTrainWorker
from miles.backends.training_utils.loss import build_denominator
from miles.config.dump import undump
from miles.config.schema import RunConfig
from miles.core.train_batch import TrainBatch
from miles.doctor.model import choose_model
from miles.doctor.samples import STEPS, Trajectory, engine_log_probs, make_batch, make_trajectories
from miles.doctor.variations import BASE, VARIATIONS, Variation
from miles.errors import MilesError
from miles.utils.process import die_with_parent

CONFIG, TASK, RESULT, SCORES, BASE_FOLDER = "config.yaml", "task.json", "result.json", "scores.json", "base"
LR = 0.02
"""Of the first step, which moves the weights smoothly (see `examined`), so that the second has ratios other than 1."""
WAIT_TIMEOUT_S = 120.0
GRADIENT = "exp_avg."
"""In the names of first moments, of the policy and of a critic."""


def examined(config: RunConfig, folder: str, reference: str | None) -> RunConfig:
    """The run's configuration, with an optimizer that shows gradients and without checks of a real engine.

    With these betas AdamW's first moment after two steps is g1 / 4 + g2 / 2; with this epsilon a step is about lr x g,
    whereas a usual one divides by the gradient's size and would make rounding noise of tiny gradients large.
    """
    data = config.model_dump(mode="json")
    own = folder == config.model.hf_checkpoint
    data["critic"] |= {"save": None, "lr": None, "lr_warmup_iters": 0, "num_only_steps": 0}
    data["critic"]["load"] = config.critic.load if own else None
    data["model"] |= {"hf_checkpoint": folder, "ref_load": reference}
    data["optimizer"] |= {
        "lr": LR,
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
        "weight_decay": 0.0,
        "adam_beta1": 0.5,
        "adam_eps": 1.0,
        "clip_grad": 0.0,
    }
    data["train"] |= {
        "global_batch_size": None,
        "num_steps_per_rollout": STEPS,
        "allow_partial_train_step": False,
        "use_dynamic_global_batch_size": False,
        "balance_data": False,
        "balance_by_flops": False,
    }
    data["parity"]["enabled"] = False
    data["ci"] = {}
    data["cluster"]["wait_timeout_s"] = WAIT_TIMEOUT_S
    return RunConfig.model_validate(data)


class Rank:
    """One rank of the variations with `world_size` ranks."""

    def __init__(self, work: Path, config: RunConfig, seed: int, rank: int, world_size: int) -> None:
        self._work, self._config, self._seed = work, config, seed
        self._rank, self._world_size = rank, world_size
        self._opened = 0

    def run(self, variations: Sequence[Variation]) -> list[dict[str, Any]]:
        """Train on the batch in each of the ways; returns what rank 0 found of each, nothing elsewhere."""
        made, log_probs = self._samples()
        rows: list[dict[str, Any]] = []
        for variation in variations:
            batch = make_batch(
                self._config,
                made,
                log_probs,
                split_all=variation.split == "all",
                shuffled=variation.shuffled,
                seed=self._seed,
            )
            budget = budget_of(batch, variation)
            out = self._work / (BASE_FOLDER if variation is BASE else f"varied-{self._world_size}")
            with self._worker(max_tokens_per_gpu=budget, balance_by_flops=variation.balance) as worker:
                metrics = worker.train(batch, 0)
                worker.save(str(out))
            if self._rank:
                continue
            row: dict[str, Any] = {"name": variation.name, "ranks": variation.ranks, "max_tokens": budget}
            row["splits"] = variation.split == "all"
            row["metrics"] = {k: v for k, v in metrics.items() if k.startswith("train/")}
            if variation is BASE:
                row |= {"gradient_norm": float(gradient(out).norm()), "facts": facts(self._config, batch)}
            else:
                row |= differences(gradient(self._work / BASE_FOLDER), gradient(out))
                shutil.rmtree(out)
            rows.append(row)
        return rows

    def _samples(self) -> tuple[list[Trajectory], list[list[float]]]:
        """Trajectories and the engine's log-probs, which rank 0 of 1 makes from the trainer's for all that follow."""
        vocab, scores = self._work / "vocab.json", self._work / SCORES
        if not scores.exists():
            with self._worker() as worker:
                vocab.write_text(json.dumps(worker.vocab_size))
                made = self._made(worker.vocab_size)
                found = worker.score([t.tokens for t in made], self._config.rollout.temperature)
                scores.write_text(json.dumps(found))
        made = self._made(json.loads(vocab.read_text()))
        return made, engine_log_probs(json.loads(scores.read_text()), seed=self._seed)

    def _made(self, vocab_size: int) -> list[Trajectory]:
        return make_trajectories(vocab_size, per_group=self._config.rollout.n_samples_per_prompt, seed=self._seed)

    @contextmanager
    def _worker(self, **train: Any) -> Iterator[FsdpTrainWorker]:
        self._opened += 1
        changed = self._config.train.model_copy(update=train)
        worker = FsdpTrainWorker(
            self._config.model_copy(update={"train": changed}),
            rank=self._rank,
            world_size=self._world_size,
            init_method=f"file://{self._work}/rendezvous-{self._world_size}-{self._opened}",
            total_optimizer_steps=STEPS,
            threads=1,
        )
        yield worker
        worker.close()


def budget_of(batch: TrainBatch, variation: Variation) -> int:
    """Tokens that a micro-batch may hold, so that each optimizer step has at least `variation.parts` of them."""
    if variation.parts == 1:
        return int(batch.total_lengths.sum())
    late_B = late(np.asarray(batch["group_index"].values))
    step = min(int(batch.total_lengths[part].sum()) for part in (late_B, ~late_B))
    return max(-(-step // variation.parts), int(batch.total_lengths.max()))


def late(group_B: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which samples are those of the second optimizer step."""
    return group_B >= (group_B.max() + 1) // STEPS


def gradient(folder: Path) -> Tensor:
    """The first moments of a saved trainer, end to end, in fp64."""
    with SavedTrainer(folder) as saved:
        names = sorted(name for name in saved.shapes if GRADIENT in name)
        return torch.cat([saved.whole(name).double().flatten() for name in names])


def differences(base: Tensor, other: Tensor) -> dict[str, float]:
    """How far `other` is from `base`, relative to its norm: along it, and across.

    Rounding has no direction, so of many parameters almost none of it is along the gradient; a wrong weight is.
    """
    change = other - base
    along = (change @ base) / (base @ base)
    return {"gradient": float(along.abs()), "direction": float((change - along * base).norm() / base.norm())}


def facts(config: RunConfig, batch: TrainBatch) -> dict[str, Any]:
    """Tokens of the batch and what an average one weighs in its optimizer step."""
    mask_R = np.asarray(batch["loss_mask"].values, dtype=np.float32)
    sample_of_R = np.repeat(np.arange(len(batch)), batch.response_lengths)
    trajectory_B, group_B = (np.asarray(batch[name].values) for name in ("trajectory", "group_index"))
    late_B = late(group_B)
    denominator = build_denominator(config.algorithm, max_response_len=config.rollout.max_response_len)
    weights_R = denominator.token_weights(
        mask_R, sample_of_R, trajectory_B, [np.flatnonzero(~late_B), np.flatnonzero(late_B)], group_B=group_B
    )
    weights = weights_R[mask_R != 0]
    return {
        "denominator": denominator.kind,
        "tokens": int(batch.total_lengths.sum()),
        "response_tokens": len(mask_R),
        "trainable_tokens": int((mask_R != 0).sum()),
        "optimizer_steps": STEPS,
        "token_weight": {"mean": weights.mean(), "min": weights.min(), "max": weights.max()},
    }


def play(variations: Sequence[Variation], work: Path, config: RunConfig, seed: int) -> list[dict[str, Any]]:
    """Fork the ranks of variations that have equally many, wait for them; the first that fails ends the others."""
    host, world_size = os.getpid(), variations[0].ranks
    pids: dict[int, int] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _be_rank(host, variations, work, Rank(work, config, seed, rank, world_size), rank)
        pids[pid] = rank
    while pids:
        pid, status = os.waitpid(-1, 0)
        rank = pids.pop(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            for other in pids:
                os.waitpid(other, 0)
            raise MilesError(_failure(work, rank, world_size, status))
    return json.loads((work / f"rows-{world_size}.json").read_text())


def _be_rank(host: int, variations: Sequence[Variation], work: Path, rank: Rank, number: int) -> None:
    """What a forked process does, to its end."""
    status = 1
    try:
        die_with_parent()
        if os.getppid() == host:
            rows = rank.run(variations)
            if number == 0:
                (work / f"rows-{variations[0].ranks}.json").write_text(json.dumps(rows))
            status = 0
    except MilesError as error:
        (work / f"error-{number}.txt").write_text(str(error))
    except BaseException:  # noqa: BLE001  told here, since the process ends below without being unwound
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group's threads may outlive its end and abort an ordinary exit


def _failure(work: Path, rank: int, world_size: int, status: int) -> str:
    told = work / f"error-{rank}.txt"
    if told.exists():
        return told.read_text()
    how = f"was ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended with an error"
    return f"rank {rank} of {world_size} {how}"


def main(folder: str) -> int:
    """Play every variation; returns the exit status."""
    work = Path(folder)
    task = json.loads((work / TASK).read_text())
    torch.set_num_threads(1)  # more would be a pool of threads, which a fork breaks
    result: dict[str, Any] = {"rows": []}
    try:
        config = undump((work / CONFIG).read_text(encoding="utf-8"))
        model = choose_model(
            config.model.hf_checkpoint,
            config.model.ref_load,
            max_parameters=task["max_parameters"],
            work=work,
            seed=task["seed"],
        )
        result["model"] = model.about
        config = examined(config, model.folder, model.reference)
        for _, same in groupby((BASE, *VARIATIONS), key=lambda variation: variation.ranks):
            result["rows"] += play(list(same), work, config, task["seed"])
    except MilesError as error:
        result["error"] = str(error)
    (work / RESULT).write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    die_with_parent()
    raise SystemExit(main(sys.argv[1]))
