"""Checks of functions and masks that nothing would use in this run."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.known import Check
from miles.config.resources import evaluates
from miles.config.schema import DataConfig, RunConfig
from miles.errors import Issue


def loss_masks_are_made_here(cfg: RunConfig) -> Iterator[Issue]:
    default = DataConfig.model_fields["loss_mask_type"].default
    if cfg.data.loss_mask_type != default and cfg.algorithm.loss_type != "sft_loss":
        yield Issue(
            "data.loss_mask_type",
            f"says how supervised fine-tuning masks conversations, and --loss-type is {cfg.algorithm.loss_type}",
            "leave --loss-mask-type out, or --loss-type sft_loss",
        )


def sample_hooks_see_samples(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.rollout.sample_hook_path and cfg.algorithm.loss_type == "sft_loss" and not evaluates(cfg):
        yield Issue(
            "rollout.sample_hook_path",
            "is called with generated samples, and supervised fine-tuning generates none",
            "leave --rollout-sample-hook-path out, or generate: --loss-type policy_loss",
        )


def evaluations_are_logged(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.eval.custom_log_function_path is not None and not evaluates(cfg):
        yield Issue(
            "eval.custom_log_function_path",
            "is called after each evaluation, and this run has none",
            "--eval-interval STEPS with --eval-prompt-data, or leave --custom-eval-rollout-log-function-path out",
        )


HOOK_CHECKS: tuple[Check, ...] = (
    loss_masks_are_made_here,
    sample_hooks_see_samples,
    evaluations_are_logged,
)
