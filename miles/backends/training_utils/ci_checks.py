"""What must hold of training under `--ci-test`, checked while it runs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from miles.backends.training_utils.parity import ParityBounds
from miles.config.schema import CiConfig
from miles.errors import TrainingError
from miles.utils.disk import append_whole, write_failure

KL_BOUND = {False: 1e-5, True: 1e-3}
"""Largest divergence of two passes over the same weights, in nats per token: in fp32, in bf16."""


class CiChecks:
    """The checks of one run; all raise TrainingError."""

    def __init__(self, ci: CiConfig, bounds: ParityBounds, *, bf16: bool) -> None:
        """Read the gradient norms to repeat. Raises TrainingError when the file is not one of `--ci-save-grad-norm`."""
        self._ci, self._bounds, self._kl_bound = ci, bounds, KL_BOUND[bf16]
        self._expected = read_grad_norms(ci.load_grad_norm) if ci.load_grad_norm else {}

    def first_step(
        self, metrics: dict[str, float], *, step: int, trainer_is_old: bool, reference_is_start: bool
    ) -> None:
        """Metrics of the first optimizer step of a rollout, in which nothing has moved yet.

        `trainer_is_old`: old log-probs are the trainer's own; `reference_is_start`: trainer and reference are equal.
        """
        if not (self._ci.test and self._ci.kl_checker):
            return
        if trainer_is_old:
            _bounded("ppo_kl", metrics, self._kl_bound, step, _TWO_PASSES)
            _bounded("pg_clipfrac", metrics, 0.0, step, _TWO_PASSES)
        if reference_is_start:
            _bounded("kl_loss", metrics, self._kl_bound, step, _TWO_PASSES)

    def log_probs(self, metrics: dict[str, float], *, step: int) -> None:
        """The mean difference of trainer's and engine's log-probs."""
        name = "train_rollout_logprob_abs_diff"
        if self._ci.test and self._ci.logprobs_checker and name in metrics:
            _bounded(name, metrics, self._bounds.mean, step, _TWO_PROGRAMS)

    def grad_norm(self, optimizer_step: int, value: float, *, writes: bool) -> None:
        """Compare a gradient norm with the one to repeat, and keep it; one rank `writes`."""
        if self._ci.save_grad_norm and writes:
            _append(self._ci.save_grad_norm, {"optimizer_step": optimizer_step, "grad_norm": value})
        if not self._expected:
            return
        expected = self._expected.get(optimizer_step)
        if expected is None or not math.isclose(value, expected, rel_tol=self._ci.grad_norm_tolerance):
            raise TrainingError(
                f"optimizer step {optimizer_step}: the gradient norm is {value}, and {self._ci.load_grad_norm} has "
                f"{expected}\n    fix: find what changed the gradient, or record anew with --ci-save-grad-norm"
            )


_TWO_PASSES = (
    "two passes over the same weights disagree: look for dropout, shifted tokens, or temperature; "
    "--ci-disable-kl-checker switches the check off"
)
_TWO_PROGRAMS = (
    "trainer and engine disagree: switch the parity gate on, which says why; "
    "--ci-disable-logprobs-checker switches the check off"
)


def _bounded(name: str, metrics: dict[str, float], bound: float, step: int, fix: str) -> None:
    value = metrics.get(name, 0.0)
    if not abs(value) <= bound:
        raise TrainingError(
            f"step {step}: {name} is {value} before the weights have moved, where it may be {bound} at most\n    fix: {fix}"
        )


def _append(path: str, row: dict[str, float]) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            append_whole(fd, json.dumps(row).encode() + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        raise write_failure(path, error) from error


def read_grad_norms(path: str) -> dict[int, float]:
    """Gradient norm of each optimizer step, from a file of `--ci-save-grad-norm`."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return {int(row["optimizer_step"]): float(row["grad_norm"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"--ci-load-grad-norm {path} does not read: {type(error).__name__}: {error}"
            "\n    fix: name a file that --ci-save-grad-norm wrote"
        ) from error
