"""Every accepted form of a rollout or generate function, turned into the one form that the rest calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from miles.core.plugins import HOOKS, check_signature, describe_error, is_async, load_function, maybe_await
from miles.core.samples import Sample
from miles.errors import HookError, MilesError
from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)

GenerateFn = Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]


class RolloutFnAdapter:
    """A user's rollout class or function behind `await fn(input)` and `await fn.close()`."""

    def __init__(self, path: str, call: Callable[[Any], Awaitable[Any]], inner: Any = None) -> None:
        self.path = path
        self._call = call
        self.inner = inner
        """The object made from the user's class; None for a function."""

    async def __call__(self, input: RolloutFnTrainInput | RolloutFnEvalInput) -> Any:
        """Collect a batch or evaluate; raises HookError when something else than groups or results comes back."""
        output = await self._call(input)
        return self._eval_output(output) if input.evaluation else self._train_output(output)

    def note_weight_version(self, version: int) -> None:
        """Tell the rollout class which version the engines hold from here on, when it has `note_weight_version()`."""
        note = getattr(self.inner, "note_weight_version", None)
        if note is not None:
            note(version)

    async def close(self) -> None:
        """Release what the user's object holds, when it has `close()`."""
        close = getattr(self.inner, "close", None)
        if close is not None:
            await maybe_await(close())

    def _train_output(self, output: Any) -> RolloutFnTrainOutput:
        if isinstance(output, RolloutFnTrainOutput):
            return output
        if isinstance(output, list) and all(isinstance(group, list) for group in output):  # pyright: ignore[reportUnknownVariableType]
            return RolloutFnTrainOutput(samples=output)  # pyright: ignore[reportUnknownArgumentType]
        raise HookError(
            self.path,
            f"returned {type(output).__name__} for training",
            "return RolloutFnTrainOutput(samples=[[Sample, ...], ...]), or that list of groups",
        )

    def _eval_output(self, output: Any) -> RolloutFnEvalOutput:
        if isinstance(output, RolloutFnEvalOutput):
            return output
        if isinstance(output, dict) and all(isinstance(result, dict) for result in output.values()):  # pyright: ignore[reportUnknownVariableType]
            return RolloutFnEvalOutput(data=output)  # pyright: ignore[reportUnknownArgumentType]
        raise HookError(
            self.path,
            f"returned {type(output).__name__} for evaluation",
            'return RolloutFnEvalOutput(data={"NAME": {"rewards": [...], "truncated": [...], "samples": [...]}})',
        )


def load_rollout_fn(
    path: str, input: RolloutFnConstructorInput, *, flag: str = "--rollout-function-path"
) -> RolloutFnAdapter:
    """Build the rollout function that `path` names: a class made with `input`, or `fn(args, rollout_id, data_source)`.

    Plain (not async) classes and functions run in a thread, so that they may block. Raises HookError when the path
    does not load or fits neither form.
    """
    found = load_function(path)
    form = check_signature(found, HOOKS[flag], path)
    if form == "class":
        inner = found(input)
        return RolloutFnAdapter(path, _off_the_loop(inner, is_async(inner)), inner)

    async def legacy(request: RolloutFnTrainInput | RolloutFnEvalInput) -> Any:
        run = _off_the_loop(found, is_async(found))
        return await run(input.args, request.rollout_id, input.data_source, evaluation=request.evaluation)

    return RolloutFnAdapter(path, legacy)


def load_generate_fn(path: str) -> GenerateFn:
    """The generate function that `path` names, as `await fn(GenerateFnInput) -> GenerateFnOutput`.

    Accepts `async fn(input)`, a class with `async __call__(self, input)`, and the older
    `async fn(args, sample, sampling_params[, evaluation])`. The result may be a `GenerateFnOutput`, a sample or a list
    of samples. What the function raises comes out as HookError, except Miles' own errors.
    """
    found = load_function(path)
    form = check_signature(found, HOOKS["--custom-generate-function-path"], path)
    fn: Callable[..., Any] = found() if form == "class" else found

    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        try:
            if form == "legacy_evaluation":
                output = await maybe_await(
                    fn(input.args, input.sample, input.sampling_params, evaluation=input.evaluation)
                )
            elif form == "legacy":
                output = await maybe_await(fn(input.args, input.sample, input.sampling_params))
            else:
                output = await maybe_await(fn(input))
        except MilesError:
            raise
        except Exception as error:
            raise HookError(path, describe_error(error), "mend the generate function") from error
        return _generate_output(path, output)

    return generate


def _generate_output(path: str, output: Any) -> GenerateFnOutput:
    samples = output.samples if isinstance(output, GenerateFnOutput) else output
    if isinstance(samples, Sample):
        return GenerateFnOutput(samples=samples)
    if isinstance(samples, list) and samples and all(isinstance(s, Sample) for s in samples):  # pyright: ignore[reportUnknownVariableType]
        return GenerateFnOutput(samples=samples)  # pyright: ignore[reportUnknownArgumentType]
    raise HookError(
        path,
        "returned an empty list" if samples == [] else f"returned {type(samples).__name__}",
        "return GenerateFnOutput(samples=sample), a Sample, or a list of Samples that form one trajectory",
    )


def _off_the_loop(fn: Callable[..., Any], awaits: bool) -> Callable[..., Awaitable[Any]]:
    """`fn` as something to await; a plain one runs in a thread, since it may block."""

    async def run(*args: Any, **kwargs: Any) -> Any:
        if awaits:
            return await fn(*args, **kwargs)
        result = await asyncio.to_thread(fn, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return run
