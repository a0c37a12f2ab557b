"""What a run's estimator brings along where its settings are unset, for people to see before the run starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miles.config.estimators import whitens
from miles.config.objectives import DENOMINATORS, OBJECTIVES, denominator_of
from miles.config.resources import num_train_ranks, trains_critic
from miles.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Implied:
    """A setting that is unset, and what the run takes for it."""

    path: str
    value: object
    why: str
    """What it follows from, in words."""

    def describe(self) -> str:
        """`PATH VALUE, by WHY`, the value as in a recipe."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.path} {value}, by {self.why}"


def implied(cfg: RunConfig) -> tuple[Implied, ...]:
    """Every setting that follows from the estimator's name; empty for runs without advantages."""
    without = cfg.algorithm.loss_type == "sft_loss" or not num_train_ranks(cfg)
    return () if without else (*_of_the_loss(cfg), *_of_the_critic(cfg))


def _of_the_loss(cfg: RunConfig) -> Iterator[Implied]:
    algorithm, name = cfg.algorithm, cfg.algorithm.advantage_estimator
    estimator = f"--advantage-estimator {name}"
    custom = algorithm.custom_advantage_function_path is not None
    if algorithm.normalize_advantages is None and whitens(name, None, custom=custom):
        yield Implied("algorithm.normalize_advantages", True, estimator)
    if algorithm.policy_objective is None and algorithm.loss_type == "policy_loss" and name in OBJECTIVES:
        yield Implied("algorithm.policy_objective", OBJECTIVES[name], estimator)
    chosen, per_token = algorithm.loss_denominator, algorithm.calculate_per_token_loss
    if chosen is None and not per_token and name in DENOMINATORS:
        yield Implied("algorithm.loss_denominator", DENOMINATORS[name], estimator)
    kind = denominator_of(name, chosen, per_token=per_token, supervised=False)
    if kind == "constant" and algorithm.loss_constant is None:
        limit = cfg.rollout.max_response_len
        yield Implied("algorithm.loss_constant", limit, f"--rollout-max-response-len {limit}")


def _of_the_critic(cfg: RunConfig) -> Iterator[Implied]:
    if not trains_critic(cfg):
        return
    if cfg.critic.load is None:
        yield Implied("critic.load", cfg.model.hf_checkpoint, "--hf-checkpoint")
    if cfg.critic.lr is None:
        yield Implied("critic.lr", cfg.optimizer.lr, "--lr")
