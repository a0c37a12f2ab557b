"""At what temperature the machine's engine scores: part of what is looked at before a start, since it depends on the machine."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.checks_prefill import LEAVE_OUT, PATH
from miles.config.resources import engine_backend, only_evaluates
from miles.config.schema import RunConfig
from miles.errors import Issue


def prompts_are_scored_at_the_temperature(cfg: RunConfig) -> Iterator[Issue]:
    if not cfg.rollout.recompute_logprobs_via_prefill or cfg.rollout.temperature == 1 or only_evaluates(cfg):
        return
    if engine_backend(cfg) == "sglang":
        yield Issue(
            PATH,
            f"SGLang scores prompts at temperature 1, and responses are sampled at {cfg.rollout.temperature:g}",
            f"--rollout-temperature 1, or {LEAVE_OUT}",
        )


SCORING_CHECKS = (prompts_are_scored_at_the_temperature,)
