from tests.fast.config.test_config_checks import OK, SFT, only, problems

HOOK = "my_hooks.log"


def test_a_mask_type_is_for_supervised_fine_tuning_alone():
    assert only(*OK, "--loss-mask-type", "qwen3") == (
        "data.loss_mask_type: says how supervised fine-tuning masks conversations, and --loss-type is policy_loss -> "
        "leave --loss-mask-type out, or --loss-type sft_loss"
    )
    assert problems(*SFT, "--loss-mask-type", "qwen3") == []
    assert problems(*OK, "--loss-mask-type", "template") == []


def test_a_sample_hook_needs_generated_samples():
    assert problems(*OK, "--rollout-sample-hook-path", HOOK, HOOK) == []
    found = only(*SFT, "--rollout-sample-hook-path", HOOK)
    assert found.startswith("rollout.sample_hook_path: is called with generated samples")
    assert found.endswith("or generate: --loss-type policy_loss")


def test_a_log_function_of_evaluations_needs_evaluations():
    flag = ["--custom-eval-rollout-log-function-path", HOOK]
    found = only(*OK, *flag)
    assert found.startswith("eval.custom_log_function_path: is called after each evaluation, and this run has none")
    assert problems(*OK, *flag, "--eval-interval", "1", "--eval-prompt-data", "heldout", "a.jsonl") == []
