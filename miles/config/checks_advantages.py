"""Rules about advantages: what an estimator needs, and settings that it would not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles.config.estimators import ESTIMATORS, EstimatorFacts, group_baseline
from miles.config.known import Check
from miles.config.resources import saves, trains_critic
from miles.config.schema import AlgorithmConfig, RunConfig
from miles.config.walk import leaves
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
    if ESTIMATORS[name].must_whiten and cfg.algorithm.normalize_advantages is False:
        yield Issue(
            "algorithm.normalize_advantages",
            f"false, but {name} is defined with advantages of mean 0 and variance 1 over the batch",
            "leave it out, which normalizes them, or another --advantage-estimator",
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


def critic_settings_have_their_effect(cfg: RunConfig) -> Iterator[Issue]:
    critic = cfg.critic
    if not trains_critic(cfg):
        for leaf in leaves():
            if leaf.section == "critic" and (value := getattr(critic, leaf.path.partition(".")[2])) != leaf.default:
                yield Issue(
                    leaf.path,
                    f"{value}, but {_without_critic(cfg.algorithm)} trains no critic",
                    f"leave out {leaf.flag}, or --advantage-estimator ppo",
                )
        return
    steps = cfg.rollout.num_rollout
    if steps is not None and critic.num_only_steps > steps:
        yield Issue(
            "critic.num_only_steps",
            f"{critic.num_only_steps} is more than the {steps} steps of the run",
            f"--num-critic-only-steps below {steps}, so that the policy is trained too",
        )
    decay, warmup = cfg.optimizer.lr_decay_iters, critic.lr_warmup_iters
    if decay is not None and decay < warmup:
        yield Issue(
            "critic.lr_warmup_iters",
            f"the critic's warm-up ends at step {warmup}, after the decay does at {decay}",
            f"--critic-lr-warmup-iters {decay} or less",
        )
    if critic.save is not None and not (saves(cfg) and cfg.checkpoint.save_hf):
        yield Issue(
            "critic.save",
            "is written when a model in Hugging Face format is put into a checkpoint, which this run never does",
            "--save-interval STEPS, without --save-hf false",
        )


def _without_critic(algorithm: AlgorithmConfig) -> str:
    supervised = algorithm.loss_type == "sft_loss"
    return "--loss-type sft_loss" if supervised else f"--advantage-estimator {algorithm.advantage_estimator}"


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
    critic_settings_have_their_effect,
    overlong_penalty_applies,
)
