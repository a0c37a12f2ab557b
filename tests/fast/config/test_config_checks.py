import pytest

from miles.config.batch_math import batch_plan
from miles.config.checks import CHECKS, INFERENCE_ROLLOUTS, SFT_ROLLOUT
from miles.config.load import load, read
from miles.config.schema import RolloutConfig, RunConfig, TrainConfig
from miles.errors import ConfigError

OK = ["--num-rollout", "3", "--rm-type", "math", "--label-key", "label"]
SFT = ["--num-rollout", "3", "--loss-type", "sft_loss", "--rollout-function-path", SFT_ROLLOUT]


def problems(*argv: str) -> list[str]:
    return [f"{issue.path}: {issue.problem} -> {issue.fix}" for issue in read(argv).issues]


def only(*argv: str) -> str:
    found = problems(*argv)
    assert len(found) == 1, found
    return found[0]


def test_sound_runs_pass():
    assert problems(*OK) == []
    assert problems(*SFT) == []
    assert problems(*OK, "--n-samples-per-prompt", "1", "--disable-rewards-normalization") == []


# Case H03: what is missing is derived.
@pytest.mark.parametrize(
    ("size", "steps", "expected"),
    [(None, 2, (32, 2)), (32, None, (32, 2)), (None, None, (64, 1)), (32, 2, (32, 2)), (64, None, (64, 1))],
)
def test_batch_plan_derives_what_is_not_given(size, steps, expected):
    train = TrainConfig(global_batch_size=size, num_steps_per_rollout=steps)
    plan = batch_plan(RunConfig(rollout=RolloutConfig(batch_size=8, n_samples_per_prompt=8), train=train))
    assert (plan.global_batch_size, plan.num_steps_per_rollout) == expected
    assert (plan.rollout_batch_size, plan.n_samples_per_prompt, plan.samples_per_rollout) == (8, 8, 64)


# Case H03: what does not divide, or contradicts itself, is refused.
@pytest.mark.parametrize(
    ("size", "steps", "message"),
    [
        (
            24,
            None,
            "train.global_batch_size: 8 prompts x 8 samples = 64 samples a rollout, which 24 does not divide\n"
            "    fix: --global-batch-size 16, or another divisor of 64; or --rollout-batch-size 9",
        ),
        (
            32,
            4,
            "train.global_batch_size: 8 prompts x 8 samples = 64 samples a rollout, but 32 samples x 4 steps = 128\n"
            "    fix: --num-steps-per-rollout 2, or --global-batch-size 16, or "
            "give only one of --global-batch-size and --num-steps-per-rollout",
        ),
        (
            None,
            7,
            "train.num_steps_per_rollout: 8 prompts x 8 samples = 64 samples a rollout, which 7 steps do not divide\n"
            "    fix: --num-steps-per-rollout 8, or another divisor of 64",
        ),
        (
            100,
            None,
            "train.global_batch_size: 8 prompts x 8 samples = 64 samples a rollout, which 100 does not divide\n"
            "    fix: --global-batch-size 64, or another divisor of 64",
        ),
    ],
)
def test_batch_plan_refuses_what_does_not_fit(size, steps, message):
    train = TrainConfig(global_batch_size=size, num_steps_per_rollout=steps)
    cfg = RunConfig(rollout=RolloutConfig(batch_size=8, n_samples_per_prompt=8), train=train)
    with pytest.raises(ConfigError) as caught:
        batch_plan(cfg)
    assert str(caught.value.issues[0]) == message


def test_batch_plan_reads_as_a_sentence():
    cfg = load([*OK, "--num-steps-per-rollout", "4"])
    assert batch_plan(cfg).describe() == (
        "32 prompts x 8 samples = 256 samples a rollout = 4 optimizer steps x 64 samples"
    )
    one = load([*OK, "--rollout-batch-size", "1", "--n-samples-per-prompt", "1", "--disable-rewards-normalization"])
    assert batch_plan(one).describe() == "1 prompt x 1 sample = 1 sample a rollout = 1 optimizer step x 1 sample"


def test_batch_sizes_that_do_not_divide_are_refused():
    assert only(*OK, "--global-batch-size", "100") == (
        "train.global_batch_size: 32 prompts x 8 samples = 256 samples a rollout, which 100 does not divide -> "
        "--global-batch-size 128, or another divisor of 256; or --rollout-batch-size 50"
    )


# Case H04.
def test_batch_that_ranks_cannot_share_is_refused_with_both_numbers():
    argv = ["--rollout-batch-size", "6", "--n-samples-per-prompt", "1", "--train-ranks", "4"]
    argv += ["--disable-rewards-normalization"]
    assert only(*OK, *argv) == (
        "cluster.train_ranks: a step of 6 samples (6 prompts x 1 sample = 6 samples a rollout = 1 optimizer step x "
        "6 samples) cannot be shared evenly by 4 trainer ranks -> --train-ranks 3, or a batch that 4 divides"
    )


def test_run_without_a_length_is_refused():
    assert only("--rm-type", "math", "--label-key", "a") == (
        "rollout.num_rollout: neither --num-rollout nor --num-epoch is given -> --num-rollout STEPS"
    )
    assert problems("--rm-type", "math", "--label-key", "a", "--num-epoch", "1") == []


def test_over_sampling_may_start_fewer_groups_at_a_time_than_a_batch_has():
    # Case E03.
    assert problems(*OK, "--over-sampling-batch-size", "1") == []


@pytest.mark.parametrize("path", INFERENCE_ROLLOUTS)
def test_sft_with_a_generating_rollout_is_refused(path):
    assert only("--num-rollout", "3", "--loss-type", "sft_loss", "--rollout-function-path", path) == (
        "rollout.function_path: --loss-type sft_loss trains on responses from the data, but this function generates "
        "them -> --rollout-function-path miles.rollout.sft_rollout.generate_rollout"
    )


def test_policy_loss_on_responses_from_the_data_is_refused():
    found = only("--num-rollout", "3", "--rollout-function-path", SFT_ROLLOUT)
    assert found.startswith("rollout.function_path: takes responses from the data, which were not sampled")
    assert found.endswith("--loss-type sft_loss, or --rollout-function-path " + INFERENCE_ROLLOUTS[0])


def test_sft_that_evaluates_needs_a_function_that_generates():
    evaluation = ["--eval-interval", "1", "--eval-prompt-data", "a", "a.jsonl"]
    assert only(*SFT, *evaluation).startswith("rollout.eval_function_path: --eval-interval 1 is given, but")
    assert problems(*SFT, *evaluation, "--eval-function-path", INFERENCE_ROLLOUTS[0]) == []


def test_policy_loss_without_a_reward_is_refused():
    assert only("--num-rollout", "3") == (
        "reward.rm_type: no reward: neither --rm-type nor --custom-rm-path is given -> "
        "--rm-type math, --rm-type exact, or --custom-rm-path package.module.function"
    )
    assert problems("--num-rollout", "3", "--custom-rm-path", "my.reward") == []
    assert problems("--num-rollout", "3", "--custom-generate-function-path", "my.generate") == []


def test_graded_reward_without_labels_is_refused():
    assert only("--num-rollout", "3", "--rm-type", "exact") == (
        "data.label_key: --rm-type exact compares with a label, but none is loaded -> "
        "--label-key KEY, the key of the answer in the data"
    )
    assert problems("--num-rollout", "3", "--rm-type", "exact", "--data-source-path", "my.Source") == []


def test_sampling_that_is_not_the_policys_is_refused_in_training_only():
    found = problems(
        *OK, "--rollout-top-p", "0.9", "--rollout-top-k", "20", "--eval-top-p", "0.9", "--eval-top-k", "5"
    )
    why = "cuts the distribution, so the log-probabilities of samples are not the policy's and ratios are wrong"
    assert found == [
        f"rollout.top_p: 0.9 {why} -> --rollout-top-p 1; --eval-top-p may cut",
        f"rollout.top_k: 20 {why} -> --rollout-top-k -1; --eval-top-k may cut",
    ]
    assert problems(*SFT, "--rollout-top-p", "0.9") == []


def test_top_k_of_zero_is_refused():
    assert (
        only(*OK, "--eval-top-k", "0") == "eval.top_k: 0 leaves no token to sample -> --eval-top-k -1 keeps all tokens"
    )


def test_kl_coefficient_without_the_kl_loss_is_refused():
    assert only(*OK, "--kl-loss-coef", "0.1") == (
        "algorithm.kl_loss_coef: 0.1 has no effect without --use-kl-loss -> --use-kl-loss, or --kl-loss-coef 0"
    )


def test_impossible_learning_rate_schedules_are_refused():
    assert only(*OK, "--lr-decay-iters", "5", "--lr-warmup-iters", "10") == (
        "optimizer.lr_decay_iters: the decay ends at step 5, before the warm-up does at 10 -> "
        "--lr-decay-iters 10 or more, since it counts the warm-up"
    )
    assert only(*OK, "--lr", "1e-6", "--min-lr", "1e-5") == (
        "optimizer.min_lr: 1e-05 is above the learning rate 1e-06 -> --min-lr 1e-06 or less"
    )


def test_lengths_that_cannot_fit_the_context_are_refused():
    context = ["--rollout-max-context-len", "100"]
    assert only(*OK, *context, "--rollout-max-response-len", "100") == (
        "rollout.max_response_len: responses of 100 tokens leave no room for a prompt in a context of 100 -> "
        "--rollout-max-response-len below 100, or a larger --rollout-max-context-len"
    )
    both = ["--rollout-max-prompt-len", "60", "--rollout-max-response-len", "50"]
    assert only(*OK, *context, *both) == (
        "rollout.max_response_len: prompts of 60 and responses of 50 tokens can have 110 together, more than a context "
        "of 100 -> --rollout-max-response-len 40 or less, or a larger --rollout-max-context-len"
    )
    prompt = ["--rollout-max-prompt-len", "100", "--rollout-max-response-len", "50"]
    assert only(*OK, *context, *prompt).startswith("rollout.max_prompt_len: prompts of 100 tokens leave no room")
    answer = ["--rollout-max-response-len", "50", "--eval-max-response-len", "200"]
    assert only(*OK, *context, *answer).startswith("eval.max_response_len: responses of 200 tokens leave no room")
    assert problems(*OK, *context, "--rollout-max-prompt-len", "50", "--rollout-max-response-len", "50") == []


def test_evaluation_needs_both_data_and_interval():
    assert only(*OK, "--eval-interval", "5") == (
        "eval.prompt_data: --eval-interval 5 is given, but nothing to evaluate on -> "
        "--eval-prompt-data NAME FILE.jsonl, or leave out --eval-interval"
    )
    assert only(*OK, "--eval-prompt-data", "a", "a.jsonl") == (
        "eval.interval: evaluation data is given, but no --eval-interval, so it would never be used -> "
        "--eval-interval STEPS, or leave out the data"
    )


def test_evaluation_data_comes_in_pairs():
    assert only(*OK, "--eval-interval", "5", "--eval-prompt-data", "a.jsonl") == (
        "eval.prompt_data: takes pairs of name and file, got 1 words: a.jsonl -> "
        "--eval-prompt-data NAME FILE.jsonl [NAME FILE.jsonl ...]"
    )


def test_two_datasets_of_one_name_are_refused():
    argv = [
        "--eval-interval",
        "5",
        "--eval-prompt-data",
        "a",
        "x.jsonl",
        "--eval.datasets",
        "{name: a, path: y.jsonl}",
    ]
    assert only(*OK, *argv) == "eval.datasets: 2 datasets have the name 'a' -> rename one: metrics are eval/a"


def test_save_folder_without_an_interval_is_refused():
    assert only(*OK, "--save", "out") == (
        "checkpoint.save: names out, but without --save-interval or --save-trigger-sentinel nothing is saved -> "
        "--save-interval STEPS"
    )
    assert problems(*OK, "--save-interval", "5") == []
    assert problems(*OK, "--save", "out", "--save-trigger-sentinel", "save-now") == []


def test_keeping_checkpoints_that_are_never_written_is_refused():
    assert only(*OK, "--keep-last", "2").startswith("checkpoint.keep_last: keeps 2 checkpoints, but without")
    assert problems(*OK, "--keep-last", "2", "--save-trigger-sentinel", "save-now") == []


REPLAY = ["--load-debug-rollout-data", "data/{rollout_id}.jsonl"]


@pytest.mark.parametrize(
    ("argv", "issue"),
    [
        (
            ["--debug-rollout-only", *REPLAY],
            "debug.rollout_only: --debug-rollout-only starts no trainer that could train on --load-debug-rollout-data",
        ),
        (
            ["--save-debug-rollout-data", "new/{rollout_id}.jsonl", *REPLAY],
            "debug.save_rollout_data: --load-debug-rollout-data generates no samples that",
        ),
        (
            ["--debug-train-only"],
            "debug.train_only: starts no engines, but miles.rollout.inference_rollout.InferenceRolloutFn generates",
        ),
        (
            ["--debug-train-only", "--debug-rollout-only", "--rollout-function-path", "my.function"],
            "debug.rollout_only: --debug-rollout-only starts no trainer and --debug-train-only no engines",
        ),
        (["--debug-rollout-only", "--save-interval", "1"], "debug.rollout_only: starts no trainer, so there is"),
        (["--debug-rollout-only", "--load", "run/checkpoints"], "debug.rollout_only: publishes no weights, so"),
        ([*REPLAY, "--save-interval", "1"], "debug.load_rollout_data: does not move through the prompts"),
        (
            [*REPLAY, "--eval-interval", "1", "--eval-prompt-data", "a", "a.jsonl"],
            "eval.interval: --eval-interval 1 is given, but a run that only trains has no engines",
        ),
        (["--save-debug-rollout-data", "data.jsonl"], "debug.save_rollout_data: data.jsonl has no {rollout_id}"),
        (["--load-debug-rollout-data", "data.jsonl"], "debug.load_rollout_data: data.jsonl has no {rollout_id}"),
    ],
)
def test_halves_of_a_run_that_exclude_something_say_what(argv, issue):
    assert only(*OK, *argv).startswith(issue)


def test_each_half_of_a_run_alone_passes_and_keeps_the_recipes_other_settings():
    assert problems(*OK, "--debug-rollout-only", "--save-debug-rollout-data", "data/{rollout_id}.jsonl") == []
    evals = ["--eval-prompt-data", "a", "a.jsonl", "--eval-interval", "null"]
    assert problems(*OK, *REPLAY, "--debug-train-only", "--save", "out", "--keep-last", "2", *evals) == []
    assert problems(*OK, "--debug-train-only", "--rollout-function-path", "my.function") == []
    assert problems(*SFT, "--debug-train-only", "--save-interval", "1") == []


def test_a_weights_folder_that_nothing_uses_is_refused():
    folder = ["--update-weight-disk-dir", "out"]
    assert only(*OK, *folder, "--weights.reload-interval", "0").startswith(
        "weights.disk_dir: names out, but weights go by tensor and nothing is proven through a folder -> "
    )
    assert problems(*OK, *folder) == []
    disk = ["--update-weight-transfer-mode", "disk"]
    assert problems(*OK, *folder, *disk, "--weights.reload-interval", "0") == []


def test_custom_name_of_a_setting_is_refused():
    assert only(*OK, "--custom", "{lr: 1, mine: 2}") == (
        "custom.lr: args.lr is the setting optimizer.lr already -> set optimizer.lr (--lr), or rename yours"
    )
    assert "--disable-rewards-normalization" in only(*OK, "--custom", "{disable_rewards_normalization: true}")


def test_custom_values_that_yaml_cannot_keep_are_refused():
    assert only(*OK, "--custom", "{since: [2024-01-01]}") == (
        "custom.since: holds a date, 2024-01-01, which a YAML file cannot keep -> "
        "put it in quotes, or use text, numbers, true, false, null, lists and mappings"
    )
    assert only(*OK, "--custom", "{weights: {1: 0.5}}").startswith("custom.weights: holds a int, 1,")


def test_contradictions_are_reported_together():
    argv = ["--kl-loss-coef", "1", "--global-batch-size", "7", "--eval-interval", "1", "--rollout-top-p", "0.5"]
    with pytest.raises(ConfigError) as caught:
        load([*OK, *argv])
    assert [issue.path for issue in caught.value.issues] == [
        "train.global_batch_size",
        "rollout.top_p",
        "algorithm.kl_loss_coef",
        "eval.prompt_data",
    ]
    assert str(caught.value).startswith("4 problems in this configuration\n  - train.global_batch_size: 32 prompts")


def test_checks_that_need_a_wrong_setting_are_skipped_and_others_run():
    found = problems(*OK, "--rollout-batch-size", "x", "--global-batch-size", "7", "--kl-loss-coef", "1")
    assert [p.partition(":")[0] for p in found] == ["--rollout-batch-size", "algorithm.kl_loss_coef"]


def test_every_check_is_listed():
    import inspect

    modules = {f.__module__: inspect.getmodule(f) for f in CHECKS}
    rules = [
        f for m in modules.values() for _, f in inspect.getmembers(m, inspect.isfunction) if f.__module__ in modules
    ]
    takes_config_only = [f for f in rules if list(inspect.signature(f).parameters) == ["cfg"]]
    assert {f.__name__ for f in takes_config_only} == {f.__name__ for f in CHECKS}


def test_one_sample_of_a_prompt_has_nothing_to_be_compared_with():
    (problem,) = problems(*OK, "--n-samples-per-prompt", "1")
    assert "rollout.n_samples_per_prompt: grpo compares the samples of a prompt" in problem
    assert "--disable-rewards-normalization" in problem
