import pytest

from miles.config.checks_losses import LOSS_CHECKS
from miles.config.schema import RunConfig
from miles.core.plugins import HOOKS, check_signature
from miles.errors import HookError


def issues(**sections):
    config = RunConfig.model_validate(sections)
    return [(issue.path, issue.problem, issue.fix) for check in LOSS_CHECKS for issue in check(config)]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": {"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "k3"}},
        {"algorithm": {"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "low_var_kl"}},
        {"algorithm": {"loss_type": "custom_loss", "custom_loss_function_path": "a.b"}},
        {"algorithm": {"eps_clip_c": 3.0, "advantage_estimator": "gspo"}},
        {"algorithm": {"calculate_per_token_loss": True, "loss_denominator": "tokens"}},
        {"algorithm": {"advantage_estimator": "dr_grpo", "loss_constant": 500}},
        {"algorithm": {"use_rollout_logprobs": True, "get_mismatch_metrics": True}},
        {"algorithm": {"use_rollout_logprobs": True, "use_rollout_entropy": True}},
        {"algorithm": {"skip_actor_forward_only": True, "use_kl_loss": True, "observe_training_entropy": True}},
        {"algorithm": {"skip_actor_forward_only": True}, "train": {"use_dynamic_global_batch_size": True}},
        {"algorithm": {"custom_pg_loss_reducer_function_path": "a.b", "calculate_per_token_loss": True}},
        {"algorithm": {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "entropy_coef": 0.1}},
        {"correction": {"use_tis": True, "upper": 3.0, "lower": 0.5}},
        {"correction": {"preset": "rejection", "keep_denominator": True}},
        {"correction": {"preset": "mis", "level": "geometric", "mode": "clip", "batch_normalize": True}},
        {"correction": {"use_tis": True, "custom_tis_function_path": "a.b", "upper": 3.0}},
        {"correction": {"rejection_level": "token", "veto_threshold": 1e-4}},
        {"correction": {"veto_threshold": 1e-4, "keep_denominator": True}},
    ],
)
def test_settings_that_go_together_pass(sections):
    assert issues(**sections) == []


@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_the_unbiased_form_is_refused_for_k1_and_k2(kind):
    ((path, problem, fix),) = issues(algorithm={"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": kind})
    assert path == "algorithm.use_unbiased_kl"
    assert kind in problem
    assert "--kl-loss-type k3" in fix


@pytest.mark.parametrize(
    ("sections", "path", "fix"),
    [
        ({"algorithm": {"kl_loss_coef": 0.1}}, "algorithm.kl_loss_coef", "--use-kl-loss"),
        ({"algorithm": {"use_unbiased_kl": True, "kl_loss_type": "k3"}}, "algorithm.use_unbiased_kl", "--use-kl-loss"),
        ({"algorithm": {"loss_type": "custom_loss"}}, "algorithm.custom_loss_function_path", "package.module.function"),
        ({"algorithm": {"custom_loss_function_path": "a.b"}}, "algorithm.custom_loss_function_path", "custom_loss"),
        ({"algorithm": {"loss_type": "sft_loss", "policy_objective": "gspo"}}, "algorithm.policy_objective", "policy_loss"),
        ({"algorithm": {"advantage_estimator": "cispo", "eps_clip_c": 3.0}}, "algorithm.eps_clip_c", "leave out"),
        ({"algorithm": {"policy_objective": "sapo", "eps_clip_high": 0.3}}, "algorithm.eps_clip_high", "--sapo-tau-pos"),
        ({"algorithm": {"calculate_per_token_loss": True, "loss_denominator": "prompts"}}, "algorithm.loss_denominator", "one of the two"),
        ({"algorithm": {"loss_constant": 9}}, "algorithm.loss_constant", "--loss-denominator constant"),
        ({"algorithm": {"advantage_estimator": "dr_grpo", "calculate_per_token_loss": True, "loss_constant": 9}}, "algorithm.loss_constant", "leave out"),
        ({"algorithm": {"get_mismatch_metrics": True}}, "algorithm.get_mismatch_metrics", "leave out"),
        ({"algorithm": {"loss_type": "sft_loss", "entropy_coef": 0.1}}, "algorithm.entropy_coef", "leave out --entropy-coef"),
        ({"algorithm": {"loss_type": "sft_loss", "use_kl_loss": True}}, "algorithm.use_kl_loss", "leave out --use-kl-loss"),
        ({"algorithm": {"loss_type": "sft_loss", "kl_coef": 0.1}}, "algorithm.kl_coef", "leave out --kl-coef"),
        ({"algorithm": {"loss_type": "sft_loss", "use_opsm": True}}, "algorithm.use_opsm", "leave out --use-opsm"),
        ({"algorithm": {"loss_type": "sft_loss", "eps_clip_c": 3.0}}, "algorithm.eps_clip_c", "leave out --eps-clip-c"),
        ({"algorithm": {"loss_type": "sft_loss", "use_rollout_entropy": True}}, "algorithm.use_rollout_entropy", "leave out --use-rollout-entropy"),
        ({"algorithm": {"loss_type": "sft_loss", "use_rollout_logprobs": True}}, "algorithm.use_rollout_logprobs", "--loss-type policy_loss"),
        ({"algorithm": {"loss_type": "sft_loss", "custom_advantage_function_path": "a.b"}}, "algorithm.custom_advantage_function_path", "leave out --custom-advantage"),
        ({"algorithm": {"loss_type": "sft_loss", "custom_pg_loss_reducer_function_path": "a.b"}}, "algorithm.custom_pg_loss_reducer_function_path", "--loss-type policy_loss"),
        ({"algorithm": {"custom_pg_loss_reducer_function_path": "a.b"}, "correction": {"preset": "mis", "keep_denominator": True}}, "correction.keep_denominator", "one of the two"),
        ({"algorithm": {"skip_actor_forward_only": True}, "train": {"num_steps_per_rollout": 2}}, "algorithm.skip_actor_forward_only", "--num-steps-per-rollout 1"),
        ({"algorithm": {"skip_actor_forward_only": True}, "train": {"global_batch_size": 16}}, "algorithm.skip_actor_forward_only", "--num-steps-per-rollout 1"),
        ({"algorithm": {"skip_actor_forward_only": True, "loss_type": "custom_loss", "custom_loss_function_path": "a.b"}}, "algorithm.skip_actor_forward_only", "--loss-type policy_loss"),
        ({"algorithm": {"skip_actor_forward_only": True, "use_rollout_logprobs": True}}, "algorithm.skip_actor_forward_only", "leave out --use-rollout-logprobs"),
        ({"algorithm": {"skip_actor_forward_only": True, "kl_coef": 0.1}}, "algorithm.skip_actor_forward_only", "--use-kl-loss"),
        ({"algorithm": {"skip_actor_forward_only": True, "custom_advantage_function_path": "a.b"}}, "algorithm.skip_actor_forward_only", "--advantage-estimator"),
        ({"algorithm": {"skip_actor_forward_only": True, "use_rollout_entropy": True}}, "algorithm.skip_actor_forward_only", "--observe-training-entropy"),
        ({"algorithm": {"skip_actor_forward_only": True, "use_opsm": True}}, "algorithm.skip_actor_forward_only", "leave out --use-opsm"),
        ({"algorithm": {"skip_actor_forward_only": True}, "correction": {"use_tis": True}}, "algorithm.skip_actor_forward_only", "section correction"),
        ({"algorithm": {"use_rollout_logprobs": True}, "correction": {"use_tis": True}}, "algorithm.use_rollout_logprobs", "leave out"),
        ({"algorithm": {"loss_type": "sft_loss"}, "correction": {"use_tis": True}}, "correction", "leave out"),
        ({"correction": {"use_tis": True, "preset": "icepop"}}, "correction.use_tis", "one of the two"),
        ({"correction": {"preset": "mis", "custom_tis_function_path": "a.b"}}, "correction.custom_tis_function_path", "one of the two"),
        ({"correction": {"upper": 3.0}}, "correction.upper", "--use-tis"),
        ({"correction": {"preset": "rejection", "level": "token"}}, "correction.level", "--tis-level"),
        ({"correction": {"use_tis": True, "upper": 1.0, "lower": 1.0}}, "correction.lower", "below"),
        ({"correction": {"preset": "rejection", "rejection_lower": 3.0}}, "correction.rejection_lower", "below"),
        ({"correction": {"preset": "rejection", "rejection_upper": 0.9}}, "correction.rejection_upper", "above 1"),
        ({"correction": {"use_tis": True, "keep_denominator": True}}, "correction.keep_denominator", "leave out"),
    ],
)  # fmt: skip
def test_settings_that_contradict_or_do_nothing_are_refused_with_the_way_out(sections, path, fix):
    found = issues(**sections)
    assert [issue[0] for issue in found] == [path]
    assert fix in found[0][2]


def test_functions_for_losses_are_checked_at_start():
    def loss(args, batch, logits, reducer): ...
    def correct(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): ...
    def positional(pg_loss): ...

    check_signature(loss, HOOKS["--custom-loss-function-path"])
    check_signature(correct, HOOKS["--custom-tis-function-path"])
    with pytest.raises(HookError):
        check_signature(positional, HOOKS["--custom-loss-function-path"])
    with pytest.raises(HookError):
        check_signature(positional, HOOKS["--custom-tis-function-path"])
