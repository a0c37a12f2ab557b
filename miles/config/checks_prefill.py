"""What `--recompute-logprobs-via-prefill` needs: responses of this run's engines, whose KV a prefill can make again."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.checks_data import INFERENCE_ROLLOUTS
from miles.config.resources import only_evaluates, only_trains
from miles.config.schema import RunConfig
from miles.errors import Issue

PATH = "rollout.recompute_logprobs_via_prefill"
LEAVE_OUT = "leave out --recompute-logprobs-via-prefill"


def responses_can_be_scored_again(cfg: RunConfig) -> Iterator[Issue]:
    if not cfg.rollout.recompute_logprobs_via_prefill or only_evaluates(cfg):
        return
    if cfg.algorithm.loss_type == "sft_loss":
        yield Issue(PATH, "has no effect with --loss-type sft_loss: no engine sampled the responses", LEAVE_OUT)
    elif only_trains(cfg):
        yield Issue(PATH, "asks the engines, and a run that only trains has none", LEAVE_OUT)
    elif cfg.rollout.function_path not in INFERENCE_ROLLOUTS:
        fix = f"{LEAVE_OUT}, or --rollout-function-path {INFERENCE_ROLLOUTS[0]}"
        yield Issue(PATH, f"is done by the built-in rollout, and the run has {cfg.rollout.function_path}", fix)
    if cfg.weights.mode == "in_place":
        yield Issue(
            PATH,
            "computes KV with the newest weights, while --pause-generation-mode in_place samples on with KV of older ones",
            f"--pause-generation-mode drain, or {LEAVE_OUT}",
        )


PREFILL_CHECKS = (responses_can_be_scored_again,)
