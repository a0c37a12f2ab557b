import pytest

from miles.config.estimators import ESTIMATORS
from miles.config.implied import implied
from miles.config.load import load
from miles.config.plan import describe_plan
from miles.config.resources import critic_optimizer
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from tests.fast.config.test_config_checks import OK, SFT, only, problems

USES_KL = "rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_one_setting_away(name):
    assert problems(*OK, "--advantage-estimator", name) == []


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_brings_whitening_and_refuses_to_do_without(name):
    assert whitened(*OK, "--advantage-estimator", name)
    assert whitened(*OK, "--advantage-estimator", name, "--normalize-advantages")
    assert only(*OK, "--advantage-estimator", name, "--normalize-advantages", "false") == (
        f"algorithm.normalize_advantages: false, but {name} is defined with advantages of mean 0 and variance 1 over the "
        "batch -> leave it out, which normalizes them, or another --advantage-estimator"
    )


def test_other_estimators_and_functions_whiten_only_when_told_to():
    own = ["--advantage-estimator", "reinforce_plus_plus", "--custom-advantage-function-path", "my.fn"]
    for flags in ([], ["--advantage-estimator", "ppo"], own, [*own, "--normalize-advantages", "false"]):
        assert not whitened(*OK, *flags)
    for flags in ([], own):
        assert whitened(*OK, *flags, "--normalize-advantages")


def whitened(*argv: str) -> bool:
    return HookArgs(load(argv), RunFacts()).normalize_advantages


def lines_implied(*argv: str) -> list[str]:
    return [one.describe() for one in implied(load(argv))]


def test_what_an_estimator_brings_along_is_listed_until_it_is_set():
    assert lines_implied(*OK) == lines_implied(*OK, "--advantage-estimator", "rloo") == []
    plus = [*OK, "--advantage-estimator", "reinforce_plus_plus"]
    by = "by --advantage-estimator"
    assert lines_implied(*plus) == [f"algorithm.normalize_advantages true, {by} reinforce_plus_plus"]
    assert lines_implied(*plus, "--normalize-advantages") == []
    gspo = [*OK, "--advantage-estimator", "gspo"]
    assert lines_implied(*gspo) == [f"algorithm.policy_objective gspo, {by} gspo"]
    assert lines_implied(*gspo, "--policy-objective", "ppo") == []
    assert lines_implied(*OK, "--advantage-estimator", "dapo") == [f"algorithm.loss_denominator tokens, {by} dapo"]
    dr_grpo = [*OK, "--advantage-estimator", "dr_grpo", "--rollout-max-response-len", "77"]
    constant = "algorithm.loss_constant 77, by --rollout-max-response-len 77"
    assert lines_implied(*dr_grpo) == [f"algorithm.loss_denominator constant, {by} dr_grpo", constant]
    assert lines_implied(*dr_grpo, "--loss-denominator", "constant") == [constant]
    assert lines_implied(*dr_grpo, "--calculate-per-token-loss") == []
    model = ["--hf-checkpoint", "FOLDER", "--lr", "0.5"]
    assert lines_implied(*PPO, *model) == ["critic.load FOLDER, by --hf-checkpoint", "critic.lr 0.5, by --lr"]
    assert lines_implied(*PPO, *model, "--critic-load", "x", "--critic-lr", "1") == []
    assert lines_implied(*SFT, "--advantage-estimator", "ppo") == []


def test_the_plan_of_a_dry_run_tells_what_is_implied():
    lines = describe_plan(load([*OK, "--advantage-estimator", "reinforce_plus_plus"]))
    said = "implied          algorithm.normalize_advantages true, by --advantage-estimator reinforce_plus_plus"
    assert said in lines


PPO = [*OK, "--advantage-estimator", "ppo"]


def test_ppo_has_its_critics_settings():
    critic = [
        "--critic-lr",
        "1e-5",
        "--critic-lr-warmup-iters",
        "2",
        "--value-clip",
        "0.5",
        "--num-critic-only-steps",
        "2",
    ]
    assert problems(*PPO, "--lambd", "0.9", "--gamma", "0.99", *critic, "--critic-load", "FOLDER") == []
    assert problems(*PPO, "--critic-save", "FOLDER", "--save-interval", "1") == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--critic-lr", "0.1"), ("--critic-load", "x"), ("--value-clip", "0.3"), ("--num-critic-only-steps", "1")],
)
def test_a_setting_of_the_critic_without_one_is_refused(flag, value):
    found = only(*OK, flag, value)
    assert found.endswith(f"{value}, but --advantage-estimator grpo trains no critic -> leave out {flag}, or --advantage-estimator ppo")  # fmt: skip
    assert "--loss-type sft_loss trains no critic" in only(*SFT, "--advantage-estimator", "ppo", flag, value)


def test_settings_of_the_critic_that_cannot_work_are_refused():
    found = only(*PPO, "--num-critic-only-steps", "4")
    assert found.startswith("critic.num_only_steps: 4 is more than the 3 steps of the run -> --num-critic-only-steps")
    found = only(*PPO, "--lr-decay-iters", "5", "--critic-lr-warmup-iters", "6")
    assert found.startswith("critic.lr_warmup_iters: the critic's warm-up ends at step 6, after the decay does at 5")
    for saving in ([], ["--save-interval", "1", "--save-hf", "false"]):
        assert only(*PPO, "--critic-save", "FOLDER", *saving).startswith("critic.save: is written when a model")


def test_the_critics_learning_rate_decays_in_proportion_to_the_policys():
    shared = ["--lr", "1e-4", "--min-lr", "1e-5", "--lr-warmup-iters", "7"]
    found = critic_optimizer(load([*PPO, *shared, "--critic-lr", "1e-3", "--critic-lr-warmup-iters", "2"]))
    assert (found.lr, found.lr_warmup_iters) == (1e-3, 2)
    assert found.min_lr == pytest.approx(1e-4)
    found = critic_optimizer(load([*PPO, *shared]))
    assert (found.lr, found.min_lr, found.lr_warmup_iters) == (1e-4, pytest.approx(1e-5), 0)
    assert critic_optimizer(load([*PPO, "--lr", "0", "--critic-lr", "1e-3"])).lr == 1e-3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--kl-coef", "0.1"],
            "algorithm.kl_coef: grpo takes no divergence off the reward, so 0.1 has no effect "
            f"-> --use-kl-loss --kl-loss-coef 0.1, or one of {USES_KL}",
        ),
        (
            ["--gamma", "0.9"],
            "algorithm.gamma: grpo gives every token the same reward, so 0.9 has no effect "
            "-> --gamma 1, or one of reinforce_plus_plus, ppo",
        ),
        (["--lambd", "0.9"], "algorithm.lambd: grpo has no critic, so 0.9 has no effect -> --lambd 1"),
    ],
)
def test_a_setting_that_the_estimator_does_not_read_is_refused(flags, message):
    assert only(*OK, *flags) == message
    assert problems(*OK, *flags, "--custom-advantage-function-path", "my.fn") == []


def test_the_divergence_is_in_the_reward_or_in_the_loss():
    found = only(*OK, "--advantage-estimator", "rloo", "--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.2")
    assert found.startswith("algorithm.kl_coef: 0.1, and the KL loss has 0.2: the divergence would count twice")
    assert problems(*OK, "--advantage-estimator", "rloo", "--kl-coef", "0.1") == []


def test_rloo_without_its_comparison_is_refused():
    found = only(*OK, "--advantage-estimator", "rloo", "--disable-rewards-normalization")
    assert found.startswith("algorithm.rewards_normalization: rloo is the comparison of a sample with the others")


def test_estimators_that_compare_nothing_take_one_sample_of_a_prompt():
    one = ["--n-samples-per-prompt", "1"]
    assert problems(*OK, *one, "--advantage-estimator", "reinforce_plus_plus") == []
    for name in ("rloo", "dr_grpo", "reinforce_plus_plus_baseline"):
        found = only(*OK, *one, "--advantage-estimator", name)
        assert found.startswith(f"rollout.n_samples_per_prompt: {name} compares the samples of a prompt")


CUSTOM = [*OK, "--loss-type", "custom_loss", "--custom-loss-function-path", "my.loss"]


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        (["--n-samples-per-prompt", "1"], "rollout.n_samples_per_prompt"),
        (["--advantage-estimator", "rloo", "--disable-rewards-normalization"], "algorithm.rewards_normalization"),
        (
            ["--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages", "false"],
            "algorithm.normalize_advantages",
        ),
        (["--kl-coef", "0.1"], "algorithm.kl_coef"),
        (["--gamma", "0.9"], "algorithm.gamma"),
        (["--lambd", "0.9"], "algorithm.lambd"),
        (["--critic-lr", "0.1"], "critic.lr"),
    ],
)
def test_a_loss_of_your_own_is_given_advantages_and_their_rules_hold(flags, path):
    assert only(*CUSTOM, *flags).startswith(f"{path}: ")


def test_a_loss_of_your_own_may_have_any_estimator_and_one_sample_of_a_prompt():
    for name in ESTIMATORS:
        assert problems(*CUSTOM, "--advantage-estimator", name) == []
    assert problems(*CUSTOM, "--n-samples-per-prompt", "1", "--disable-rewards-normalization") == []
    assert problems(*CUSTOM, "--advantage-estimator", "ppo", "--critic-lr", "0.1", "--lambd", "0.9") == []
    assert problems(*CUSTOM, "--advantage-estimator", "rloo", "--kl-coef", "0.1") == []


def test_supervised_runs_have_no_advantages_to_check():
    assert problems(*SFT, "--advantage-estimator", "ppo", "--gamma", "0.5") == []


def test_the_overlong_penalty_fits_and_applies():
    length = ["--rollout-max-response-len", "1000"]
    assert problems(*OK, *length, "--overlong-buffer-len", "1000", "--overlong-penalty-factor", "0.5") == []
    assert only(*OK, *length, "--overlong-buffer-len", "1001") == (
        "reward.overlong_buffer_len: 1001 tokens do not fit into responses of at most 1000 "
        "-> --overlong-buffer-len 1000 or less, or a larger --rollout-max-response-len"
    )
    assert only(*OK, *length, "--overlong-penalty-factor", "0.5") == (
        "reward.overlong_penalty_factor: 0.5 has no effect without --overlong-buffer-len "
        "-> --overlong-buffer-len TOKENS, such as 200"
    )
    found = only(*OK, *length, "--overlong-buffer-len", "200", "--custom-reward-post-process-path", "my.fn")
    assert found.startswith("reward.overlong_buffer_len: --custom-reward-post-process-path makes the rewards")
