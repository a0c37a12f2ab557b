import json
import pickle
import re

import numpy as np
import pytest

from miles.core.samples import Sample, reward_value
from miles.utils import types


def answered():
    sample = Sample(group_index=1, index=5, prompt="q", tokens=[1, 2])
    sample.append_response([3, 4], [-0.1, -0.2], "ab", "7")
    sample.append_response([5], [-0.3], "c", "8")
    return sample


def test_hooks_find_the_sample_where_they_look_for_it():
    assert types.Sample is Sample


def test_sampled_tokens_keep_their_log_probs_and_versions():
    sample = answered()
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 3, 4, 5], "abc", 3)
    assert sample.rollout_log_probs == [-0.1, -0.2, -0.3]
    assert sample.version_spans == [(0, "7"), (2, "8")]
    assert sample.weight_versions == ["7", "8"]
    sample.append_response([6], [-0.4], "d", "8")
    assert sample.version_spans == [(0, "7"), (2, "8")]
    sample.validate()
    with pytest.raises(ValueError, match="2 token ids but 1 log-probs"):
        sample.append_response([1, 2], [0.0], "x", "8")


def test_only_trainable_tokens_make_a_sample_stale():
    sample = answered()
    assert sample.oldest_weight_version == 7
    sample.loss_mask = [0, 0, 1]
    assert sample.oldest_weight_version == 8
    sample.loss_mask = [0, 0, 0]
    assert sample.oldest_weight_version is None
    assert sample.effective_response_length == 0


def test_a_sample_survives_json_and_pickle():
    sample = answered()
    sample.metadata = {"tools": [1, {"a": None}]}
    sample.status = Sample.Status.TRUNCATED
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"no such field of a sample: rewrad; the fields are .*reward"):
        Sample.from_dict({"rewrad": 1})
    with pytest.raises(AttributeError):
        Sample().rewrad = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_length": 9}, "response_length is 9 but there are 5 tokens"),
        ({"loss_mask": [1]}, "1 entries of loss_mask but 3 response tokens"),
        ({"rollout_log_probs": [0.0] * 4}, "4 entries of rollout_log_probs but 3 response tokens"),
        ({"loss_mask": [1, 2, 0]}, "loss_mask holds values other than 0 and 1"),
        ({"version_spans": [(1, "7")]}, "version_spans start at [1]"),
        ({"version_spans": [(0, "7"), (4, "8")]}, "version_spans start at [0, 4]; they must rise from 0 within"),
    ],
)
def test_lengths_that_disagree_are_named(change, message):
    sample = answered()
    for name, value in change.items():
        setattr(sample, name, value)
    with pytest.raises(ValueError, match=re.escape(f"sample 5 (group 1): {message}")):
        sample.validate()


def test_a_retry_starts_from_the_prompt():
    sample = answered()
    sample.reward, sample.loss_mask, sample.remove_sample = 1.0, [1, 1, 1], True
    sample.status = Sample.Status.ABORTED
    sample.reset_for_retry()
    assert sample == Sample(group_index=1, index=5, prompt="q", tokens=[1, 2])


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("q", "q"),
        ([{"role": "user", "content": "q"}], "user: q"),
        (
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "content": None},
            ],
            "system: Be brief.\nuser: What?\nassistant: ",
        ),
        ([], ""),
    ],
)
def test_a_prompt_of_any_form_can_be_joined_with_its_response(prompt, text):
    sample = Sample(prompt=prompt, response="a")
    assert sample.prompt_text == text
    assert sample.prompt_text + sample.response == text + "a"


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([2]).sum(), 2.0),
        ({"score": 1.0}, 1.0),
        ({"score": False}, 0.0),
    ],
)
def test_every_kind_of_number_becomes_a_float(reward, value):
    found = Sample(reward=reward).get_reward_value("score")
    assert found == value
    assert type(found) is float


@pytest.mark.parametrize(
    ("reward", "key", "message"),
    [
        ({"score": 1.0, 3: 0}, None, "the reward is an object with keys ['3', 'score']; name one with --reward-key"),
        ({"acc": 1.0}, "score", "the reward object has no 'score', only ['acc']"),
        (None, None, "the reward is None; return a number"),
        ({"score": None}, "score", "the reward is None; return a number"),
        (float("nan"), None, "the reward is nan; return a finite number"),
        (np.float32("inf"), None, "the reward is inf; return a finite number"),
        ("1.0", None, "the reward is the text '1.0'; return a number"),
        ([1.0], None, "the reward is [1.0], not a number"),
    ],
)
def test_what_is_no_finite_number_is_refused_with_the_way_out(reward, key, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        reward_value(reward, key)
