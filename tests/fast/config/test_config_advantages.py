import pytest

from miles.config.estimators import ESTIMATORS
from miles.config.load import load
from miles.config.resources import critic_optimizer
from tests.fast.config.test_config_checks import OK, SFT, only, problems

USES_KL = "rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo"


def needs(name: str) -> list[str]:
    return ["--normalize-advantages"] if ESTIMATORS[name].must_whiten else []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_one_setting_away(name):
    assert problems(*OK, "--advantage-estimator", name, *needs(name)) == []


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_asks_for_whitening(name):
    found = only(*OK, "--advantage-estimator", name)
    assert found.startswith(f"algorithm.normalize_advantages: {name} is defined with")
    assert found.endswith("-> --normalize-advantages")


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
    assert problems(*OK, *one, "--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages") == []
    for name in ("rloo", "dr_grpo", "reinforce_plus_plus_baseline"):
        found = only(*OK, *one, "--advantage-estimator", name, *needs(name))
        assert found.startswith(f"rollout.n_samples_per_prompt: {name} compares the samples of a prompt")


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
