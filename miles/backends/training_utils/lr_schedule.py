"""Learning rate of each optimizer step: warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math

from miles.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0 over the whole run; skipped steps count.

    Warm-up rises linearly to `lr` over `lr_warmup_iters` steps, the first of which already trains. The decay to `min_lr`
    ends with step `lr_decay_iters`, or with the run's `total_steps`.
    """
    warmup = optimizer.lr_warmup_iters
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    if optimizer.lr_decay_style == "constant":
        return optimizer.lr
    end = optimizer.lr_decay_iters or total_steps
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    remaining = 1 - progress if optimizer.lr_decay_style == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * remaining
