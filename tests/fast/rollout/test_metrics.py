import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.samples import Sample
from miles.rollout.metrics import (
    dump_rows,
    eval_metrics,
    finite_only,
    is_repetitive,
    length_metrics,
    mean_pass_at_k,
    pass_at_k,
    rollout_metrics,
)


def make_sample(index, group, reward, length=4, status=Sample.Status.COMPLETED, version="1"):
    sample = Sample(group_index=group, index=index, prompt="p?", tokens=[5, 6])
    sample.append_response([7] * length, [-0.5] * length, "answer", version)
    sample.status, sample.reward = status, reward
    return sample


def test_lengths_rewards_and_ratios_of_a_batch():
    groups = [
        [make_sample(0, 0, 1.0, 10), make_sample(1, 0, 1.0, 20)],
        [make_sample(2, 1, 0.0, 30, Sample.Status.TRUNCATED), make_sample(3, 1, 1.0, 40, version="2")],
    ]
    metrics = rollout_metrics(groups, elapsed_s=2.0)
    expected = {
        "rollout/reward": 0.75,
        "rollout/response_len/mean": 25.0,
        "rollout/response_len/max": 40.0,
        "rollout/response_len/min": 10.0,
        "rollout/truncated_ratio": 0.25,
        "rollout/zero_std": 0.5,
        "rollout/all_one": 0.5,
        "rollout/all_zero": 0.0,
        "rollout/response_tokens": 100.0,
        "rollout/response_tokens_per_s": 50.0,
        "rollout/weight_version/min": 1.0,
        "rollout/weight_version/max": 2.0,
        "rollout/num_samples": 4.0,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_the_mean_length_of_correct_samples_pairs_rewards_with_their_own_lengths():
    rewards, lengths = [1, 0, 0, 1], [10, 20, 30, 40]
    groups = [[make_sample(i, i, r, n)] for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    for order in ([2, 0, 3, 1], [0, 1, 2, 3]):
        metrics = rollout_metrics([groups[i] for i in order])
        assert metrics["rollout/response_len/correct_mean"] == 25.0


def test_undefined_rewards_are_counted_and_do_not_enter_the_mean():
    # Case H07.
    rewards = [0.5, None, float("nan"), 0.8, 0.6, 0.7]
    metrics = rollout_metrics([[make_sample(i, 0, r) for i, r in enumerate(rewards)]])
    assert metrics["rollout/reward"] == pytest.approx(0.65)
    assert metrics["rollout/unscored"] == 2.0


def test_without_rewards_the_reward_metrics_are_left_out():
    # Case E16: no reward function, no metric.
    metrics = rollout_metrics([[make_sample(0, 0, None)]])
    assert "rollout/reward" not in metrics
    assert metrics["rollout/num_samples"] == 1.0


def test_a_trajectory_counts_once_in_the_mean_reward():
    fragments = [make_sample(0, 0, 1.0), make_sample(0, 0, 1.0), make_sample(0, 0, 1.0)]
    assert rollout_metrics([[fragments, make_sample(1, 0, 0.0)]])["rollout/reward"] == 0.5


def test_an_empty_batch_has_no_metrics():
    assert rollout_metrics([]) == {}


def test_text_that_goes_round_in_circles_is_repetitive():
    words = " ".join(str(i * i) for i in range(400))
    assert is_repetitive("again " * 2000)
    assert not is_repetitive(words)
    assert not is_repetitive("")


# Case E15.
@pytest.mark.parametrize(("n", "c", "k", "want"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (8, 0, 4, 0.0)])
def test_pass_at_k_is_the_unbiased_estimate(n, c, k, want):
    assert pass_at_k(n, c, k) == pytest.approx(want)


def test_pass_at_1_over_single_samples_is_the_share_of_solved_problems():
    # Case E15.
    solved = [1] * 50 + [0] * 114
    assert mean_pass_at_k([[float(c)] for c in solved]) == {1: pytest.approx(0.3049, abs=1e-4)}


def test_pass_at_k_is_not_defined_for_more_than_n():
    with pytest.raises(ValueError, match=r"pass@10 is not defined for 1 correct of 1 samples"):
        pass_at_k(1, 1, 10)


@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_sample(n, data):
    # Case E15.
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_pass_at_k_is_reported_for_powers_of_two_and_prompts_with_enough_samples():
    # Case E15.
    found = mean_pass_at_k([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0]])
    assert found == {1: pytest.approx((1 / 6 + 1) / 2), 2: pytest.approx((1 / 3 + 1) / 2), 4: pytest.approx(2 / 3)}
    assert mean_pass_at_k([[1.0, None]]) == {}
    assert mean_pass_at_k([]) == {}


def test_the_pass_rate_of_training_groups_is_reported_on_request():
    groups = [[make_sample(0, 0, 1.0), make_sample(1, 0, 0.0)], [make_sample(2, 1, 0.0), make_sample(3, 1, 0.0)]]
    metrics = rollout_metrics(groups, passrate=True)
    assert (metrics["rollout/pass@1"], metrics["rollout/pass@2"]) == (0.25, 0.5)
    assert not any("pass@" in name for name in rollout_metrics(groups))


def test_the_raw_reward_of_the_metadata_is_what_is_reported():
    samples = [make_sample(0, 0, -1.0), make_sample(1, 0, 1.0)]
    samples[0].metadata["raw_reward"] = 0.5
    samples[1].metadata["raw_reward"] = None
    metrics = rollout_metrics([samples])
    assert (metrics["rollout/reward"], metrics["rollout/unscored"]) == (0.5, 1.0)


def test_lengths_have_mean_median_tail_and_maximum():
    assert length_metrics("len", list(range(101))) == {"len/mean": 50, "len/median": 50, "len/p95": 95, "len/max": 100}
    assert length_metrics("len", []) == {}


def test_non_finite_metrics_are_left_out_and_counted():
    assert finite_only({"a": 1.0, "b": float("nan"), "c": float("inf")}) == ({"a": 1.0}, 2)


def test_rows_are_valid_json_with_what_a_reader_wants():
    sample = make_sample(3, 1, {"score": float("nan"), "n": np.float32(2)})
    sample.metadata = {"source": "gsm", "shape": (1, 2), "odd": {1}}
    chat = make_sample(4, 1, 1.0)
    chat.prompt = [{"role": "user", "content": "hi"}]
    rows = json.loads(json.dumps(dump_rows([[sample, chat]]), allow_nan=False))
    assert rows[0]["reward"] == {"score": None, "n": 2.0}
    assert rows[0]["prompt"] == "p?"
    assert rows[0]["response"] == "answer"
    assert rows[0]["status"] == "completed"
    assert (rows[0]["prompt_length"], rows[0]["response_length"]) == (2, 4)
    assert rows[0]["weight_versions"] == ["1"]
    assert rows[1]["prompt"] == "user: hi"


def test_results_of_an_evaluation_function_without_metrics_give_mean_and_truncation():
    results = {
        "held": {"rewards": [1.0, 0.0, None, float("nan")], "truncated": [True, False, False, False]},
        "objects": {"rewards": [{"score": 0.5}]},
        "nothing": {},
    }
    assert eval_metrics(results, "score") == {
        "eval/held": 0.5,
        "eval/held/unscored": 2.0,
        "eval/held/none_reward_ratio": 0.5,
        "eval/held/truncated_ratio": 0.25,
        "eval/objects": 0.5,
        "eval/objects/unscored": 0.0,
        "eval/objects/none_reward_ratio": 0.0,
        "eval/nothing/unscored": 0.0,
    }
