"""The function face of the rollout: what users' functions written against functions import from here."""

from __future__ import annotations

import asyncio
from typing import Any

from miles.core.ports import DataSource
from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.inference_rollout import InferenceRolloutFn, state
from miles.utils import http_utils


def GenerateState(args: Any) -> state.GenerateState:
    """The state of the rollout that runs the calling generate function (tokenizer, sampling parameters, `aborted`).

    Called outside of one it builds a state of its own.
    """
    return state.current_state.get() or state.GenerateState(args)


def generate_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One batch from `InferenceRolloutFn`, or one evaluation with it.

    Builds tokenizer and reward workers anew in each call and ends them; the class keeps them. Must not be called from
    a running event loop.
    """

    async def run() -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        rollout = InferenceRolloutFn(RolloutFnConstructorInput(args, data_source))
        try:
            return await rollout(RolloutFnEvalInput(rollout_id) if evaluation else RolloutFnTrainInput(rollout_id))
        finally:
            await rollout.close()
            await http_utils.aclose()

    return asyncio.run(run())
