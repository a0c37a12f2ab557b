import asyncio
import time
from types import SimpleNamespace

import pytest

from miles.config.reward_types import REWARD_TYPES
from miles.core.samples import Sample
from miles.errors import ConfigError, DataError, HookError
from miles.rollout.rm_hub.hub import REWARDS, RewardHub

FUNCTIONS = """
import asyncio
import time
import numpy as np

async def length(args, sample, **kwargs):
    return len(sample.response)

def plain(args, sample):
    return {"score": np.float32(0.5), "why": "because", "accuracy": True}

async def raises(args, sample):
    raise ZeroDivisionError("no way")

async def nan(args, sample):
    return float("nan")

async def nothing(args, sample):
    return None

async def text(args, sample):
    return "1.0"

async def listed(args, sample):
    return [1.0]

async def truth(args, sample):
    return True

cancelled = []

async def hangs(args, sample):
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        cancelled.append(sample.index)
        raise

def blocks(args, sample):
    time.sleep(2 if sample.index == 0 else 0)
    return 1.0

async def per_group(args, samples, **kwargs):
    return [float(s.index) for s in samples]

async def short_group(args, samples):
    return [1.0]

async def nan_in_group(args, samples):
    return [1.0, float("nan")]

async def one_for_all(args, samples):
    return 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "rewards_of_test.py").write_text(FUNCTIONS)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    yield
    patch.undo()


@pytest.fixture
def make_hub(tmp_path):
    hubs = []
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "pad_token": {"content": "<|pad|>"}}')

    def make_hub(function=None, **changes):
        values = {
            "rm_type": None,
            "custom_rm_path": None if function is None else f"rewards_of_test.{function}",
            "group_rm": False,
            "reward_key": None,
            "eval_reward_key": None,
            "reward_timeout_s": 10.0,
            "reward_num_workers": 1,
            "max_reward_error_rate": 1.0,
            "hf_checkpoint": str(tmp_path),
        }
        hubs.append(RewardHub(SimpleNamespace(**(values | changes))))
        return hubs[-1]

    yield make_hub
    for hub in hubs:
        asyncio.run(hub.close())


def sample(response="", index=7, **fields):
    return Sample(index=index, group_index=3, response=response, **fields)


def error_of(hub, *subjects, kind=HookError):
    call = hub.grade_group(list(subjects)) if len(subjects) > 1 else hub.grade(subjects[0])
    with pytest.raises(kind) as caught:
        asyncio.run(call)
    assert all(s.reward is None for s in subjects)
    return str(caught.value)


def test_the_table_has_the_names_of_the_setting():
    assert tuple(REWARDS) == REWARD_TYPES


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (" yes\n", "yes", 1),
        ("yes <|end|>", "yes", 1),
        ("yes<|end|><|pad|><|pad|>", " yes ", 1),
        ("yes", "Yes", 0),
        ("yes no", "yes", 0),
        ("<|end|>", "yes", 0),
        ("42", 42, 1),
        ("42", 42.0, 0),
    ],
)
def test_exact_compares_stripped_text_without_end_tokens(make_hub, response, label, reward):
    graded = sample(response, label=label)
    assert asyncio.run(make_hub(rm_type="exact").grade(graded)) == reward
    assert graded.reward == reward


def test_math_is_the_reward_of_that_name(make_hub):
    group = [sample(rf"so \boxed{{{x}}}<|end|>", label="0.5") for x in (r"\frac{1}{2}", "2")]
    hub = make_hub(rm_type="math")
    assert asyncio.run(hub.grade_group(group)) == [1.0, 0.0]
    assert [s.reward for s in group] == [1.0, 0.0]
    assert hub.metrics() == {
        "rollout/reward_timeouts": 0.0,
        "rollout/reward_crashes": 0.0,
        "rollout/reward_bad_labels": 0.0,
    }


def test_a_row_may_name_its_own_reward(make_hub):
    row = sample("Half", label="Half", metadata={"rm_type": "exact"})
    assert asyncio.run(make_hub(rm_type="math").grade(row)) == 1.0
    assert "did you mean math? the built-in rewards are math, " in error_of(
        make_hub(rm_type="math"), sample("x", label="x", metadata={"rm_type": "maths"}), kind=DataError
    )


def test_a_label_that_cannot_be_graded_against_names_the_sample(make_hub):
    text = error_of(make_hub(rm_type="math"), sample("5"), kind=DataError)
    assert "--rm-type math: sample 7 (group 3): the row has no label" in text
    assert "--label-key" in text


def test_no_reward_at_all_is_a_configuration_error(make_hub):
    assert "set --rm-type (math, " in error_of(make_hub(), sample("x"), kind=ConfigError)


# Case C15.
def test_custom_functions_may_be_async_or_plain_and_win_over_the_type(make_hub):
    assert asyncio.run(make_hub("length", rm_type="exact").grade(sample("four"))) == 4.0
    reward = asyncio.run(make_hub("plain", reward_key="score", eval_reward_key="accuracy").grade(sample()))
    assert reward == {"score": 0.5, "why": "because", "accuracy": 1.0}
    assert type(reward["score"]) is float
    truth = asyncio.run(make_hub("truth").grade(sample()))
    assert (truth, type(truth)) == (1.0, float)


def test_a_path_that_does_not_import_fails_before_any_sample(make_hub):
    with pytest.raises(HookError, match="no_such"):
        make_hub("no_such")


@pytest.mark.parametrize(
    ("function", "settings", "problem"),
    [
        ("raises", {}, "rewards_of_test.raises: on sample 7 (group 3): raised ZeroDivisionError: no way\n    at "),
        ("nan", {}, "on sample 7 (group 3): the reward is nan; return a finite number"),
        ("nothing", {}, "the reward is None; return a number"),
        ("text", {}, "the reward is the text '1.0', not a number"),
        ("listed", {}, "the reward is [1.0], not a number"),
        ("plain", {}, "name one with --reward-key"),
        ("plain", {"reward_key": "acc"}, "the reward object has no 'acc'"),
        ("plain", {"reward_key": "why"}, "the reward is the text 'because', not a number"),
    ],
)
def test_a_reward_error_names_function_and_sample_and_is_no_zero(make_hub, function, settings, problem):
    assert problem in error_of(make_hub(function, **settings), sample())


def test_an_async_function_that_hangs_is_cancelled(make_hub):
    hub = make_hub("hangs", reward_timeout_s=0.2)
    start = time.monotonic()
    text = error_of(hub, sample(index=41))
    assert "rewards_of_test.hangs: took longer than 0.2 s on sample 41 (group 3); it was cancelled" in text
    assert time.monotonic() - start < 5
    assert hub.metrics() == {"rollout/reward_timeouts": 1.0, "rollout/reward_errors/timeout": 1.0}
    import rewards_of_test

    assert rewards_of_test.cancelled == [41]


def test_cancelling_the_caller_cancels_the_function(make_hub):
    async def run():
        job = asyncio.ensure_future(make_hub("hangs").grade(sample(index=42)))
        await asyncio.sleep(0.05)
        job.cancel()
        await asyncio.wait({job})
        return job.cancelled()

    assert asyncio.run(run())
    import rewards_of_test

    assert 42 in rewards_of_test.cancelled


def test_a_plain_function_that_hangs_neither_stops_the_loop_nor_keeps_its_place(make_hub):
    hub = make_hub("blocks", reward_timeout_s=0.3)

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        results = await asyncio.gather(*(hub.grade(sample(index=0)) for _ in range(8)), return_exceptions=True)
        after = await hub.grade(sample(index=1))
        ticking.cancel()
        return results, after, ticks

    results, after, ticks = asyncio.run(run())
    assert all("its thread may still be running" in str(result) for result in results)
    assert after == 1.0
    assert ticks > 5


def test_calls_that_were_cancelled_keep_no_place_and_waiting_ones_do_not_start(make_hub):
    hub = make_hub("blocks", reward_timeout_s=30)

    async def run():
        jobs = [asyncio.ensure_future(hub.grade(sample(index=0))) for _ in range(12)]
        await asyncio.sleep(0.1)
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)
        return await asyncio.wait_for(hub.grade(sample(index=1)), 1)

    assert asyncio.run(run()) == 1.0


def test_a_group_function_gets_the_group_and_returns_one_reward_each(make_hub):
    group = [sample(index=4), sample(index=5)]
    assert asyncio.run(make_hub("per_group", group_rm=True).grade_group(group)) == [4.0, 5.0]
    assert [s.reward for s in group] == [4.0, 5.0]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("short_group", "returned 1 rewards for the 2 samples of group 3 (samples 4 to 5)"),
        ("nan_in_group", "on sample 5 (group 3): the reward is nan"),
        ("one_for_all", "returned float on group 3"),
    ],
)
def test_group_functions_that_return_something_else_are_errors(make_hub, function, problem):
    assert problem in error_of(make_hub(function, group_rm=True), sample(index=4), sample(index=5))


def test_the_first_error_in_a_group_cancels_the_other_calls(make_hub):
    hub = make_hub("hangs", reward_timeout_s=0.3)
    start = time.monotonic()
    error_of(hub, *(sample(index=i) for i in range(50, 54)))
    assert time.monotonic() - start < 5
