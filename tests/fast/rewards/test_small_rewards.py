import asyncio
import hashlib
import time

import pytest

from miles.core.samples import Sample
from miles.rollout.rm_hub.final_part import final_part, without_endings
from miles.rollout.rm_hub.judge import judge_score
from miles.rollout.rm_hub.random_rewards import DeterministicRandom, Random
from miles.rollout.rm_hub.think_format import answer_of, has_think_answer_form


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        # Case A22.
        ("Reward: 10", 10.0),
        ("Reward: 1e-1", 0.1),
        ("Reward: -2.5", -2.5),
        ("**Reward: 0.5**.", 0.5),
        ("Reward: nan", None),
        ("Reward: 1.2.3", None),
        ("no score", None),
        ("Reward: inf", None),
        ("Reward: 1e999", None),
        ("Reward: 7/10", None),
        ("Reward: 80%", None),
        ("Reward: 1,000", None),
        ("Reward: 1_000", None),
        ("Reward:", None),
        ("**Reward:** 3", 3.0),
        ("__Reward: 0.5__", 0.5),
        ("Reward: [[4]]", 4.0),
        ("reward = .5,", 0.5),
        ("Reward: 2 of 5", 2.0),
        ("Reward: 1\nno, Reward: 2", 2.0),
        ("Reward: 1\nno, Reward: none", None),
        ("NoReward: 4", None),
    ],
)
def test_a_judges_number_is_read_whole_or_not_at_all(verdict, score):
    assert judge_score(verdict) == score


def test_a_judges_number_may_have_another_name():
    assert judge_score("Reward: 1\nFinal score: 7", "score") == 7


@pytest.mark.parametrize(
    ("response", "fits"),
    [
        # Case A27.
        ("<think>a</think><answer>b</answer>", True),
        ("<think>a</think>\n<answer>b</answer>", True),
        ("<think>a</think><think>b</think><answer>c</answer>", False),
        ("x<think>a</think><answer>b</answer>", False),
        ("<think>a</think> prose <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> and more", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</think></answer>", False),
        ("<think>a</think><answer>b", False),
        ("", False),
    ],
)
def test_each_tag_is_there_once_and_in_order(response, fits):
    assert has_think_answer_form(response) is fits
    assert (answer_of(response) == "b") is fits


def test_the_hash_reward_is_that_of_tokens_and_response():
    for tokens, response in (([1, 2], "a"), ([1, 3], "a"), ([], ""), ([1, 2], "b\ud800")):
        wanted = hashlib.sha256(f"{tokens}{response}".encode("utf-8", "surrogatepass")).digest()[0] % 2
        sample = Sample(tokens=tokens, response=response)
        assert asyncio.run(DeterministicRandom().grade_sample("cut", sample)) == wanted


def test_chance_gives_both_rewards():
    async def draw():
        return [await Random().grade("x", None) for _ in range(200)]

    assert set(asyncio.run(draw())) == {0.0, 1.0}


def test_the_final_part_follows_the_last_thought_and_an_open_one_has_none():
    assert final_part("<think>a</think>b<think>c</think> d") == " d"
    assert final_part("a</think>b") == "b"
    assert final_part("b") == "b"
    assert final_part("<think>a") is None
    assert final_part("<think>a</think>b<think>c") is None


def test_endings_are_removed_with_the_spaces_between_them_in_linear_time():
    assert without_endings("yes <e> \n<p><e> ", ["<e>", "<p>"]) == "yes"
    assert without_endings("<e>yes", ["<e>"]) == "<e>yes"
    began = time.process_time()
    assert without_endings("yes" + "<e> " * 250_000, ["<e>", "<p>"]) == "yes"
    assert time.process_time() - began < 2
