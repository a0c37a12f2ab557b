import pytest

from miles.config.estimators import ESTIMATORS
from tests.fast.config.test_config_checks import OK, SFT, only, problems

USES_KL = "rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo"


def needs(name: str) -> list[str]:
    return ["--normalize-advantages"] if ESTIMATORS[name].must_whiten else []


@pytest.mark.parametrize("name", [n for n, facts in ESTIMATORS.items() if not facts.needs_values])
def test_every_estimator_is_one_setting_away(name):
    assert problems(*OK, "--advantage-estimator", name, *needs(name)) == []


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_asks_for_whitening(name):
    found = only(*OK, "--advantage-estimator", name)
    assert found.startswith(f"algorithm.normalize_advantages: {name} is defined with")
    assert found.endswith("-> --normalize-advantages")


def test_ppo_asks_for_a_critic():
    found = only(*OK, "--advantage-estimator", "ppo", "--lambd", "0.9", "--gamma", "0.99")
    assert found.startswith(
        "algorithm.advantage_estimator: ppo needs a critic, and no critic is trained -> one of grpo,"
    )


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
