import asyncio

import pytest

from miles.errors import HookError
from miles.rollout.log_functions import LogFunction

HERE = "tests.fast.rollout.test_log_functions"
SAMPLES = ["a", "b"]


def adds(rollout_id, args, samples, extra_metrics, rollout_time):
    assert (rollout_id, args, samples, rollout_time) == (3, "args", SAMPLES, 1.5)
    extra_metrics["mine"] = len(samples)


async def replaces(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics.clear()
    extra_metrics["mine"] = 7
    return True


def breaks(rollout_id, args, samples, extra_metrics, rollout_time):
    raise KeyError("score")


def answers(rollout_id, args, samples, extra_metrics, rollout_time):
    return {"mine": 1}


def writes_text(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics["mine"] = "high"


def logged(name):
    function = LogFunction(name and f"{HERE}.{name}")
    call = function(3, "args", SAMPLES, defaults={"usual": 1.0}, extra={"collect": 2.0}, after=(1.5,))
    return asyncio.run(call)


def test_without_a_function_all_metrics_are_logged():
    assert logged(None) == {"usual": 1.0, "collect": 2.0}


def test_a_function_adds_metrics():
    assert logged("adds") == {"usual": 1.0, "collect": 2.0, "mine": 2.0}


def test_true_leaves_the_usual_metrics_out():
    assert logged("replaces") == {"mine": 7.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "raised KeyError: 'score'"),
        ("answers", "returned dict .*\n    fix: return True to leave"),
        ("writes_text", r"left str 'high' in extra_metrics\['mine'\]"),
    ],
)
def test_a_function_that_is_wrong_is_named(name, message):
    with pytest.raises(HookError, match=f"{HERE}.{name}: {message}"):
        logged(name)
