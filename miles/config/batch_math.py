"""How a rollout batch divides into optimizer steps: prompts x samples = global batch x steps."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.schema import RunConfig
from miles.errors import ConfigError, Issue


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batch arithmetic of a run: `samples_per_rollout == global_batch_size * num_steps_per_rollout`.

    With a partial last step, or steps of about equal size, `global_batch_size` is that of the largest step.
    """

    rollout_batch_size: int
    n_samples_per_prompt: int
    samples_per_rollout: int
    global_batch_size: int
    num_steps_per_rollout: int

    def describe(self) -> str:
        """`32 prompts x 8 samples = 256 samples a rollout = 4 optimizer steps x 64 samples`."""
        return (
            f"{_count(self.rollout_batch_size, 'prompt')} x {_count(self.n_samples_per_prompt, 'sample')}"
            f" = {_count(self.samples_per_rollout, 'sample')} a rollout"
            f" = {_count(self.num_steps_per_rollout, 'optimizer step')} x {'' if self.is_even else 'up to '}"
            f"{_count(self.global_batch_size, 'sample')}"
        )

    @property
    def is_even(self) -> bool:
        """Whether every step has as many samples."""
        return self.global_batch_size * self.num_steps_per_rollout == self.samples_per_rollout


def batch_plan(cfg: RunConfig) -> BatchPlan:
    """The batch arithmetic of `cfg`; what is not given is derived.

    Raises ConfigError when the given sizes contradict each other or do not divide.
    """
    plan = derive_batch_plan(
        rollout_batch_size=cfg.rollout.batch_size,
        n_samples_per_prompt=cfg.rollout.n_samples_per_prompt,
        global_batch_size=cfg.train.global_batch_size,
        num_steps_per_rollout=cfg.train.num_steps_per_rollout,
        allow_partial=cfg.train.allow_partial_train_step,
        dynamic=cfg.train.use_dynamic_global_batch_size,
    )
    if isinstance(plan, Issue):
        raise ConfigError([plan])
    return plan


def derive_batch_plan(
    *,
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    global_batch_size: int | None,
    num_steps_per_rollout: int | None,
    allow_partial: bool = False,
    dynamic: bool = False,
) -> BatchPlan | Issue:
    """As `batch_plan`, from values; gives the issue when they do not fit. One step per rollout when neither is given.

    With `allow_partial` the last step may be smaller; with `dynamic` steps may differ by a sample.
    """
    total = rollout_batch_size * n_samples_per_prompt
    product = f"{rollout_batch_size} prompts x {n_samples_per_prompt} samples = {total} samples a rollout"
    size, steps = global_batch_size, num_steps_per_rollout
    if size is not None and allow_partial and steps in (None, -(-total // size)):
        return _plan(rollout_batch_size, n_samples_per_prompt, size=min(size, total), steps=-(-total // size))
    if size is None and dynamic:
        steps = min(steps or 1, total)
        return _plan(rollout_batch_size, n_samples_per_prompt, size=-(-total // steps), steps=steps)
    if size is not None and steps is not None and size * steps != total:
        return Issue(
            "train.global_batch_size",
            f"{product}, but {size} samples x {steps} steps = {size * steps}",
            _either(total, size, steps),
        )
    if size is not None and total % size:
        return Issue(
            "train.global_batch_size",
            f"{product}, which {size} does not divide",
            f"--global-batch-size {_nearest_divisor(total, size)}, or another divisor of {total}"
            f"{_other_batch(size, n_samples_per_prompt, rollout_batch_size)}",
        )
    if steps is not None and total % steps:
        return Issue(
            "train.num_steps_per_rollout",
            f"{product}, which {steps} steps do not divide",
            f"--num-steps-per-rollout {_nearest_divisor(total, steps)}, or another divisor of {total}",
        )
    steps = steps or (total // size if size else 1)
    return _plan(rollout_batch_size, n_samples_per_prompt, size=total // steps, steps=steps)


def _plan(prompts: int, n: int, *, size: int, steps: int) -> BatchPlan:
    return BatchPlan(
        rollout_batch_size=prompts,
        n_samples_per_prompt=n,
        samples_per_rollout=prompts * n,
        global_batch_size=size,
        num_steps_per_rollout=steps,
    )


def _either(total: int, size: int, steps: int) -> str:
    ways: list[str] = []
    if total % size == 0:
        ways.append(f"--num-steps-per-rollout {total // size}")
    if total % steps == 0:
        ways.append(f"--global-batch-size {total // steps}")
    return ", or ".join([*ways, "give only one of --global-batch-size and --num-steps-per-rollout"])


def _nearest_divisor(total: int, wanted: int) -> int:
    low = next(n for n in range(min(wanted, total), 0, -1) if total % n == 0)
    high = next(n for n in range(min(wanted, total), total + 1) if total % n == 0)
    return low if wanted - low <= high - wanted else high


def _other_batch(size: int, n: int, prompts: int) -> str:
    """Another number of prompts that fills whole steps of `size` samples, when there is one near."""
    fitting = [p for p in range(prompts, 2 * prompts + 1) if p * n % size == 0]
    return f"; or --rollout-batch-size {fitting[0]}" if fitting else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
