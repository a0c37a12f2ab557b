"""Rules about advantages: what an estimator needs, and settings that it would not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles.config.estimators import ESTIMATORS, EstimatorFacts, group_baseline
from miles.config.known import Check
from miles.config.schema import RunConfig
from miles.errors import Issue


def samples_can_be_compared(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    if algorithm.loss_type == "sft_loss" or cfg.reward.custom_post_process_path is not None:
        return
    estimator, normalize = algorithm.advantage_estimator, algorithm.rewards_normalization
    baseline = group_baseline(estimator, normalize=normalize, divide_std=algorithm.grpo_std_normalization)
    if baseline is not None and cfg.rollout.n_samples_per_prompt == 1:
        yield Issue(
            "rollout.n_samples_per_prompt",
            f"{estimator} compares the samples of a prompt, and one sample has nothing to be compared with, "
            "so every advantage would be 0",
            "--n-samples-per-prompt 2 or more, or --disable-rewards-normalization to train on the reward itself",
        )
    if baseline is None and estimator == "rloo":
        yield Issue(
            "algorithm.rewards_normalization",
            "rloo is the comparison of a sample with the others, which --disable-rewards-normalization leaves out",
            "leave out --disable-rewards-normalization, or --advantage-estimator grpo to train on the reward itself",
        )


def estimator_has_what_it_needs(cfg: RunConfig) -> Iterator[Issue]:
    name = cfg.algorithm.advantage_estimator
    if cfg.algorithm.loss_type == "sft_loss" or cfg.algorithm.custom_advantage_function_path is not None:
        return
    if ESTIMATORS[name].needs_values:
        yield Issue(
            "algorithm.advantage_estimator",
            f"{name} needs a critic, and no critic is trained",
            f"one of {_names(lambda facts: not facts.needs_values)}",
        )
    if ESTIMATORS[name].must_whiten and not cfg.algorithm.normalize_advantages:
        yield Issue(
            "algorithm.normalize_advantages",
            f"{name} is defined with advantages of mean 0 and variance 1 over the batch",
            "--normalize-advantages",
        )


def settings_of_the_estimator_are_read(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    if algorithm.loss_type == "sft_loss":
        return
    if algorithm.kl_coef > 0 and algorithm.kl_loss_coef > 0:
        yield Issue(
            "algorithm.kl_coef",
            f"{algorithm.kl_coef}, and the KL loss has {algorithm.kl_loss_coef}: the divergence would count twice",
            "--kl-coef 0 to have it in the loss, or --kl-loss-coef 0 to have it in the reward",
        )
    if algorithm.custom_advantage_function_path is not None:
        return
    name = algorithm.advantage_estimator
    facts = ESTIMATORS[name]
    if algorithm.kl_coef > 0 and not facts.uses_kl:
        yield Issue(
            "algorithm.kl_coef",
            f"{name} takes no divergence off the reward, so {algorithm.kl_coef} has no effect",
            f"--use-kl-loss --kl-loss-coef {algorithm.kl_coef}, or one of {_names(lambda facts: facts.uses_kl)}",
        )
    if algorithm.gamma != 1 and not facts.discounts:
        yield Issue(
            "algorithm.gamma",
            f"{name} gives every token the same reward, so {algorithm.gamma} has no effect",
            f"--gamma 1, or one of {_names(lambda facts: facts.discounts)}",
        )
    if algorithm.lambd != 1 and not facts.needs_values:
        yield Issue("algorithm.lambd", f"{name} has no critic, so {algorithm.lambd} has no effect", "--lambd 1")


def overlong_penalty_applies(cfg: RunConfig) -> Iterator[Issue]:
    reward, limit = cfg.reward, cfg.rollout.max_response_len
    if reward.overlong_buffer_len is None:
        if reward.overlong_penalty_factor != 1:
            yield Issue(
                "reward.overlong_penalty_factor",
                f"{reward.overlong_penalty_factor} has no effect without --overlong-buffer-len",
                f"--overlong-buffer-len TOKENS, such as {max(1, limit // 5)}",
            )
        return
    if reward.overlong_buffer_len > limit:
        yield Issue(
            "reward.overlong_buffer_len",
            f"{reward.overlong_buffer_len} tokens do not fit into responses of at most {limit}",
            f"--overlong-buffer-len {limit} or less, or a larger --rollout-max-response-len",
        )
    if reward.custom_post_process_path is not None:
        yield Issue(
            "reward.overlong_buffer_len",
            "--custom-reward-post-process-path makes the rewards that are trained on, so no penalty would be taken off",
            "leave out one of the two",
        )


def _names(which: Callable[[EstimatorFacts], bool]) -> str:
    return ", ".join(name for name, facts in ESTIMATORS.items() if which(facts))


ADVANTAGE_CHECKS: tuple[Check, ...] = (
    samples_can_be_compared,
    estimator_has_what_it_needs,
    settings_of_the_estimator_are_read,
    overlong_penalty_applies,
)
