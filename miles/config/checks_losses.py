"""Rules about losses, corrections and denominators: what contradicts, and settings that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.batch_math import derive_batch_plan
from miles.config.known import Check
from miles.config.objectives import objective_of
from miles.config.schema import AlgorithmConfig, CorrectionConfig, RunConfig
from miles.errors import Issue


def kl_loss_is_switched_on(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    if algorithm.kl_loss_coef > 0 and not algorithm.use_kl_loss:
        yield Issue(
            "algorithm.kl_loss_coef",
            f"{algorithm.kl_loss_coef} has no effect without --use-kl-loss",
            "--use-kl-loss, or --kl-loss-coef 0",
        )
    if algorithm.use_unbiased_kl and not algorithm.use_kl_loss:
        yield Issue("algorithm.use_unbiased_kl", "has no effect without --use-kl-loss", "--use-kl-loss as well")


def unbiased_kl_is_k3(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    if algorithm.use_unbiased_kl and algorithm.kl_loss_type in ("k1", "k2"):
        yield Issue(
            "algorithm.use_unbiased_kl",
            f"weighs an estimate whose value is unbiased and never negative, which {algorithm.kl_loss_type} is not",
            "--kl-loss-type k3 or low_var_kl, or leave out --use-unbiased-kl",
        )


def custom_loss_has_its_function(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    if algorithm.loss_type == "custom_loss" and algorithm.custom_loss_function_path is None:
        yield Issue(
            "algorithm.custom_loss_function_path",
            "--loss-type custom_loss is given, but no function",
            "--custom-loss-function-path package.module.function",
        )
    if algorithm.loss_type != "custom_loss" and algorithm.custom_loss_function_path is not None:
        yield Issue(
            "algorithm.custom_loss_function_path",
            f"{algorithm.custom_loss_function_path} has no effect with --loss-type {algorithm.loss_type}",
            "--loss-type custom_loss, or leave out the function",
        )


def supervised_loss_reads_its_settings(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    if algorithm.loss_type != "sft_loss":
        return
    for name, flag, value in (
        ("kl_coef", "--kl-coef", algorithm.kl_coef),
        (
            "custom_advantage_function_path",
            "--custom-advantage-function-path",
            algorithm.custom_advantage_function_path,
        ),
        ("use_kl_loss", "--use-kl-loss", algorithm.use_kl_loss),
        ("entropy_coef", "--entropy-coef", algorithm.entropy_coef),
        ("eps_clip_c", "--eps-clip-c", algorithm.eps_clip_c),
        ("use_opsm", "--use-opsm", algorithm.use_opsm),
        ("use_rollout_logprobs", "--use-rollout-logprobs", algorithm.use_rollout_logprobs),
        ("use_rollout_entropy", "--use-rollout-entropy", algorithm.use_rollout_entropy),
    ):
        if value:
            problem = (
                "has no effect with --loss-type sft_loss, which is cross-entropy on the response and nothing else"
            )
            yield Issue(f"algorithm.{name}", problem, f"leave out {flag}, or --loss-type policy_loss")


def reducer_makes_the_sum(cfg: RunConfig) -> Iterator[Issue]:
    algorithm, path = cfg.algorithm, "algorithm.custom_pg_loss_reducer_function_path"
    if algorithm.custom_pg_loss_reducer_function_path is None:
        return
    if algorithm.loss_type != "policy_loss":
        yield Issue(
            path,
            f"sums the terms of the policy gradient, which --loss-type {algorithm.loss_type} does not have",
            "leave out --custom-pg-loss-reducer-function-path, or --loss-type policy_loss",
        )
    if cfg.correction.keep_denominator:
        yield Issue(
            "correction.keep_denominator",
            "has no effect on the policy gradient: --custom-pg-loss-reducer-function-path divides it in its own way",
            "leave out one of the two",
        )


def forward_pass_can_be_skipped(cfg: RunConfig) -> Iterator[Issue]:
    algorithm, path = cfg.algorithm, "algorithm.skip_actor_forward_only"
    if not algorithm.skip_actor_forward_only:
        return
    leave_out = "leave out --skip-actor-forward-only"
    if algorithm.loss_type != "policy_loss":
        problem = (
            f"takes old log-probabilities from the policy loss, and the run has --loss-type {algorithm.loss_type}"
        )
        yield Issue(path, problem, f"{leave_out}, or --loss-type policy_loss")
    plan = derive_batch_plan(
        rollout_batch_size=cfg.rollout.batch_size,
        n_samples_per_prompt=cfg.rollout.n_samples_per_prompt,
        global_batch_size=cfg.train.global_batch_size,
        num_steps_per_rollout=cfg.train.num_steps_per_rollout,
        allow_partial=cfg.train.allow_partial_train_step,
        dynamic=cfg.train.use_dynamic_global_batch_size,
    )
    if not isinstance(plan, Issue) and plan.num_steps_per_rollout != 1:
        yield Issue(
            path,
            "takes the weights that are trained for those that sampled, which is true of the first optimizer step of a "
            f"rollout alone, and there are {plan.num_steps_per_rollout}",
            f"--num-steps-per-rollout 1, or {leave_out}",
        )
    for needs, problem, other in (
        (algorithm.use_rollout_logprobs, "contradicts --use-rollout-logprobs", "leave out --use-rollout-logprobs"),
        (algorithm.kl_coef > 0, "leaves no log-probabilities for the divergence that --kl-coef takes off the reward",
         "--use-kl-loss --kl-loss-coef in place of --kl-coef"),
        (_corrects(cfg.correction), "leaves no log-probabilities that a correction could compare with the engine's",
         "leave out the settings of the section correction"),
        (algorithm.custom_advantage_function_path is not None,
         "leaves no log_probs for --custom-advantage-function-path", "an --advantage-estimator"),
        (algorithm.use_rollout_entropy, "leaves out the pass that --use-rollout-entropy reports from",
         "--observe-training-entropy in place of --use-rollout-entropy"),
        (algorithm.use_opsm, "makes all ratios 1, so that --use-opsm leaves out nothing", "leave out --use-opsm"),
    ):  # fmt: skip
        if needs:
            yield Issue(path, problem, f"{leave_out}, or {other}")


def objective_reads_its_settings(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    if algorithm.loss_type != "policy_loss":
        if algorithm.policy_objective is not None:
            yield Issue(
                "algorithm.policy_objective",
                f"{algorithm.policy_objective} has no effect with --loss-type {algorithm.loss_type}",
                "--loss-type policy_loss, or leave out --policy-objective",
            )
        return
    objective = objective_of(algorithm.advantage_estimator, algorithm.policy_objective)
    if algorithm.eps_clip_c is not None and objective not in ("ppo", "gspo"):
        yield Issue(
            "algorithm.eps_clip_c",
            f"{algorithm.eps_clip_c} has no effect: the objective {objective} has no dual clip",
            "leave out --eps-clip-c, or --policy-objective ppo",
        )
    if algorithm.eps_clip_high is not None and objective in ("sapo", "dppo"):
        yield Issue(
            "algorithm.eps_clip_high",
            f"{algorithm.eps_clip_high} has no effect: the objective {objective} clips no ratios",
            "--sapo-tau-pos and --sapo-tau-neg, or --dppo-bound, in its place",
        )


def denominator_is_chosen_once(cfg: RunConfig) -> Iterator[Issue]:
    algorithm = cfg.algorithm
    chosen = algorithm.loss_denominator
    if algorithm.calculate_per_token_loss and chosen not in (None, "tokens"):
        yield Issue(
            "algorithm.loss_denominator",
            f"{chosen} contradicts --calculate-per-token-loss, which means tokens",
            "leave out one of the two",
        )
    is_constant = chosen == "constant" or (
        chosen is None and algorithm.advantage_estimator == "dr_grpo" and not algorithm.calculate_per_token_loss
    )
    if algorithm.loss_constant is not None and not is_constant:
        yield Issue(
            "algorithm.loss_constant",
            f"{algorithm.loss_constant} has no effect: the denominator is not constant",
            "--loss-denominator constant, or leave out --loss-constant",
        )


def corrections_are_possible(cfg: RunConfig) -> Iterator[Issue]:
    algorithm, correction = cfg.algorithm, cfg.correction
    if not _corrects(correction):
        return
    if algorithm.loss_type != "policy_loss":
        yield Issue(
            "correction",
            f"corrects the policy gradient, which --loss-type {algorithm.loss_type} does not have",
            "leave out the settings of the section correction",
        )
    if algorithm.use_rollout_logprobs:
        yield Issue(
            "algorithm.use_rollout_logprobs",
            "takes the engine's log-probabilities for the old ones, so nothing is left to correct: every weight is 1",
            "leave out --use-rollout-logprobs, or the correction",
        )


def correction_settings_agree(cfg: RunConfig) -> Iterator[Issue]:
    c = cfg.correction
    if c.use_tis and c.preset not in ("none", "tis"):
        yield Issue("correction.use_tis", f"contradicts --correction-preset {c.preset}", "leave out one of the two")
    if c.custom_tis_function_path is not None and c.preset != "none":
        yield Issue(
            "correction.custom_tis_function_path",
            f"is used in place of a preset's weights, and --correction-preset {c.preset} is given too",
            "leave out one of the two",
        )
    weighs = (c.use_tis or c.preset not in ("none", "rejection")) and c.custom_tis_function_path is None
    for path, flag, value in (
        ("correction.level", "--tis-level", c.level),
        ("correction.mode", "--tis-mode", c.mode),
        ("correction.upper", "--tis-clip", c.upper),
        ("correction.lower", "--tis-clip-low", c.lower),
        ("correction.batch_normalize", "--tis-batch-normalize", c.batch_normalize or None),
    ):
        # A user's function reads bounds from its args, so they have an effect then.
        if value is not None and not weighs and c.custom_tis_function_path is None:
            problem = f"{value} has no effect: no correction by weights is chosen"
            yield Issue(path, problem, f"--use-tis or --correction-preset, or leave out {flag}")
    if c.upper is not None and c.lower is not None and c.lower >= c.upper:
        yield _crossed("correction.lower", c.lower, c.upper, "--tis-clip-low", "--tis-clip")
    if c.rejection_lower is not None and c.rejection_lower >= c.rejection_upper:
        yield _crossed(
            "correction.rejection_lower", c.rejection_lower, c.rejection_upper, "--rs-clip-low", "--rs-clip"
        )
    if c.rejection_lower is None and c.rejection_upper <= 1 and _rejects(c):
        yield Issue(
            "correction.rejection_upper",
            f"{c.rejection_upper} with a lower bound of 1 / {c.rejection_upper} would reject every token",
            "--rs-clip above 1, or --rs-clip-low as well",
        )
    if c.keep_denominator and not (_rejects(c) or _masks(c) or c.veto_threshold or c.custom_tis_function_path):
        yield Issue(
            "correction.keep_denominator",
            "has no effect: no correction that rejects tokens is chosen",
            "leave out --keep-rejected-in-denominator",
        )


def mismatch_metrics_have_a_use(cfg: RunConfig) -> Iterator[Issue]:
    algorithm: AlgorithmConfig = cfg.algorithm
    if algorithm.get_mismatch_metrics and not algorithm.use_rollout_logprobs:
        yield Issue(
            "algorithm.get_mismatch_metrics",
            "has no effect without --use-rollout-logprobs: the metrics are reported anyway",
            "leave out --get-mismatch-metrics",
        )


def _rejects(correction: CorrectionConfig) -> bool:
    return correction.rejection_level is not None or correction.preset == "rejection"


def _masks(correction: CorrectionConfig) -> bool:
    return correction.mode == "mask" or (correction.mode is None and correction.preset in ("mis", "icepop"))


def _corrects(correction: CorrectionConfig) -> bool:
    return (
        correction.use_tis
        or correction.preset != "none"
        or _rejects(correction)
        or correction.veto_threshold is not None
        or correction.custom_tis_function_path is not None
    )


def _crossed(path: str, lower: float, upper: float, lower_flag: str, upper_flag: str) -> Issue:
    return Issue(path, f"{lower} is not below the upper bound {upper}", f"{lower_flag} below {upper_flag}")


LOSS_CHECKS: tuple[Check, ...] = (
    kl_loss_is_switched_on,
    unbiased_kl_is_k3,
    custom_loss_has_its_function,
    supervised_loss_reads_its_settings,
    reducer_makes_the_sum,
    forward_pass_can_be_skipped,
    objective_reads_its_settings,
    denominator_is_chosen_once,
    corrections_are_possible,
    correction_settings_agree,
    mismatch_metrics_have_a_use,
)
