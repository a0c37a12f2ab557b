import threading

import pytest

from miles.core.samples import Sample
from miles.errors import EngineError, HookError
from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.inference_rollout.compatibility import load_generate_fn, load_rollout_fn
from tests.fast.rollout.support import run


class AsyncClass:
    closed = False

    def __init__(self, input):
        self.input = input

    async def __call__(self, input):
        if input.evaluation:
            return RolloutFnEvalOutput(data={"d": {"rewards": [float(input.rollout_id)]}})
        return RolloutFnTrainOutput(samples=[[Sample(index=input.weight_version)]], metrics={"m": 1.0})

    async def close(self):
        AsyncClass.closed = True


class SyncClass:
    def __init__(self, input):
        self.args = input.args

    def __call__(self, input):
        assert threading.current_thread() is not threading.main_thread()
        return [[Sample(index=input.rollout_id)]]


def legacy(args, rollout_id, data_source, evaluation=False):
    assert threading.current_thread() is not threading.main_thread()
    return {"d": {"rewards": [1.0]}} if evaluation else [[Sample(index=rollout_id, label=(args, data_source))]]


async def async_legacy(args, rollout_id, data_source, evaluation=False):
    return RolloutFnTrainOutput(samples=[[Sample(index=rollout_id)]])


def nonsense(args, rollout_id, data_source, evaluation=False):
    return "done"


async def new_form(input):
    return GenerateFnOutput(samples=input.sample)


class GenerateClass:
    async def __call__(self, input):
        return [input.sample]


async def legacy_generate(args, sample, sampling_params):
    sample.label = (args, sampling_params["temperature"])
    return sample


async def legacy_generate_evaluation(args, sample, sampling_params, evaluation=False):
    sample.label = evaluation
    return sample


async def raising_engine_error(input):
    raise EngineError("gone")


async def empty_list(input):
    return []


class State:
    args = "the args"


def load(name):
    return load_rollout_fn(f"{__name__}.{name}", RolloutFnConstructorInput("args", "source"))


@pytest.mark.parametrize("name", ["AsyncClass", "SyncClass", "legacy", "async_legacy"])
def test_every_form_of_a_rollout_function_gives_a_train_output(name):
    async def test():
        rollout = load(name)
        output = await rollout(RolloutFnTrainInput(7, weight_version=7))
        assert isinstance(output, RolloutFnTrainOutput)
        assert output.samples[0][0].index == 7
        await rollout.close()

    run(test())


@pytest.mark.parametrize("name", ["AsyncClass", "legacy"])
def test_evaluation_gives_an_eval_output(name):
    async def test():
        output = await load(name)(RolloutFnEvalInput(1))
        assert isinstance(output, RolloutFnEvalOutput)
        assert output.data == {"d": {"rewards": [1.0]}}

    run(test())


def test_an_older_function_gets_args_and_data_source():
    async def test():
        output = await load("legacy")(RolloutFnTrainInput(0))
        assert output.samples[0][0].label == ("args", "source")

    run(test())


def test_close_reaches_the_users_object():
    async def test():
        AsyncClass.closed = False
        await load("AsyncClass").close()
        assert AsyncClass.closed

    run(test())


@pytest.mark.parametrize(
    ("request_", "message"),
    [(RolloutFnTrainInput(0), "returned str for training"), (RolloutFnEvalInput(0), "returned str for evaluation")],
)
def test_a_rollout_function_that_returns_nonsense_is_named(request_, message):
    async def test():
        with pytest.raises(HookError, match=f"nonsense: {message}"):
            await load("nonsense")(request_)

    run(test())


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("new_form", None),
        ("GenerateClass", None),
        ("legacy_generate", ("the args", 0.5)),
        ("legacy_generate_evaluation", True),
    ],
)
def test_every_form_of_a_generate_function_gets_its_arguments(name, label):
    async def test():
        generate = load_generate_fn(f"{__name__}.{name}")
        output = await generate(GenerateFnInput(State(), Sample(index=3), {"temperature": 0.5}, True))
        (sample,) = output.samples if isinstance(output.samples, list) else [output.samples]
        assert (sample.index, sample.label) == (3, label)

    run(test())


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("raising_engine_error", EngineError, "gone"), ("empty_list", HookError, "returned an empty list")],
)
def test_errors_of_generate_functions_keep_their_kind(name, kind, message):
    async def test():
        with pytest.raises(kind, match=message):
            await load_generate_fn(f"{__name__}.{name}")(GenerateFnInput(State(), Sample(), {}))

    run(test())


def two_arguments(args, sample):
    return sample


def test_a_signature_that_fits_no_form_is_refused_when_loaded():
    with pytest.raises(HookError, match=r"two_arguments\(args, sample\)"):
        load_generate_fn(f"{__name__}.two_arguments")
    with pytest.raises(HookError, match=r"two_arguments\(args, sample\)"):
        load("two_arguments")
