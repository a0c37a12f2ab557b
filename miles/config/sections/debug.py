"""Settings of half runs and of checks for tests."""

from __future__ import annotations

from typing import Annotated

from pydantic import PositiveFloat

from miles.config.base import ConfigModel, Flag


class DebugConfig(ConfigModel):
    """Half a run at a time: generate without a trainer, or train without engines."""

    save_rollout_data: Annotated[str | None, Flag("--save-debug-rollout-data")] = None
    """File that keeps the samples of each step, to be trained on again: `data/{rollout_id}.jsonl`, where `{rollout_id}` becomes the step's number."""
    load_rollout_data: Annotated[str | None, Flag("--load-debug-rollout-data")] = None
    """Train on the samples that `--save-debug-rollout-data` wrote to this file; starts no engines, as with `--debug-train-only`."""
    rollout_only: Annotated[bool, Flag("--debug-rollout-only")] = False
    """Generate and evaluate with the weights of `--hf-checkpoint`; starts no trainer and publishes no weights."""
    train_only: Annotated[bool, Flag("--debug-train-only")] = False
    """Start neither engines nor router; the samples come from `--load-debug-rollout-data` or a rollout function that needs no engines."""


class CiConfig(ConfigModel):
    """Checks of the learning core while it trains, for tests."""

    test: Annotated[bool, Flag("--ci-test")] = False
    """Stop the run when a check below fails."""
    kl_checker: Annotated[bool, Flag(inverted=("--ci-disable-kl-checker",))] = True
    """The first optimizer step of a rollout has no divergence from the old policy and clips nothing; the run's first has none from the reference."""
    logprobs_checker: Annotated[bool, Flag(inverted=("--ci-disable-logprobs-checker",))] = True
    """Trainer's and engine's log-probabilities differ by no more than the parity gate allows, also when that is off."""
    save_grad_norm: Annotated[str | None, Flag("--ci-save-grad-norm")] = None
    """File to which the gradient norm of each optimizer step is appended, a JSON object a line."""
    load_grad_norm: Annotated[str | None, Flag("--ci-load-grad-norm")] = None
    """File of `--ci-save-grad-norm` whose gradient norms this run must repeat."""
    grad_norm_tolerance: PositiveFloat = 1e-3
    """Largest relative difference from the gradient norms of `--ci-load-grad-norm`."""
